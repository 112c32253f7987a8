"""bitsandbytes: 4-bit codes of a table, in blocks of a flattened matrix, and 8-bit integers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Annotated, Any, Self

import msgspec
import torch
from torch import Tensor

from rosebatch.core.errors import UserError
from rosebatch.host.model_files import shown
from rosebatch.model.lazy_tensor import LazyTensor, select
from rosebatch.model.quantization.dense import DenseWeight
from rosebatch.model.quantization.grouped import scaled
from rosebatch.model.quantization.packing import AT_ONCE
from rosebatch.model.quantization.stored import finite, host_array, shape_of, stored_as, stored_scales
from rosebatch.model.weights import FLOATS, Checkpoint
from rosebatch.ops.layout import Layout
from rosebatch.ops.weight import Weight

# The largest 8-bit integer: stored scales are the largest values of rows.
_LARGEST = 127
_STATES = ("nf4", "fp4")
# Dtypes of a number that names an order.
_INTEGERS = ("U8", "I8", "I32", "I64")

_Positive = Annotated[int, msgspec.Meta(gt=0)]


class _State(msgspec.Struct):
    """What the checkpoint says of a matrix of 4-bit codes; scales are codes themselves if they are nested."""

    shape: tuple[int, ...]
    blocksize: _Positive
    nested_blocksize: _Positive | None = None
    nested_offset: float | None = None


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """See ``Form``."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """By ``quantization_config``, which says nothing that the tensors do not."""
        return cls()

    @property
    def layouts(self) -> Sequence[Layout]:
        """See ``Form``."""
        # Blocks are of the flattened matrix.
        return []

    def find(self, weights: Checkpoint, name: str, shape: tuple[int, ...]) -> Weight | None:
        """See ``Form``."""
        own = name.removesuffix("weight")
        if weights.shape(f"{own}SCB") is not None:
            _require_rows(weights, f"{own}weight_format")
            found = scaled(weights, name, f"{own}SCB", shape, (1, 0), ["I8"])
            return replace(found, scales=found.scales.map(lambda read: read / _LARGEST))
        for kind in _STATES:
            stored = f"{name}.quant_state.bitsandbytes__{kind}"
            if weights.shape(stored) is not None:
                state = _read_state(weights, stored)
                if state.shape != shape:
                    raise UserError(f"tensor {name!r} has shape {shown(state.shape)}, config says {shape}")
                return DenseWeight(_whole(weights, name, state))
        return None


def _require_rows(weights: Checkpoint, name: str) -> None:
    """Check that 8-bit numbers are in the order of rows, not in that of a GPU's tiles."""
    shape = weights.shape(name)
    if shape is not None and host_array(weights, name, shape, *_INTEGERS).any():
        raise UserError(f"tensor {weights.name_of(name)!r} is not 0: numbers in another order are not supported")


def _read_state(weights: Checkpoint, name: str) -> _State:
    read = host_array(weights, name, shape_of(weights, name), "U8")
    try:
        state = msgspec.json.decode(read.tobytes(), type=_State)
        if (state.nested_blocksize is None) != (state.nested_offset is None):
            raise ValueError("nested_blocksize and nested_offset need each other")
    except ValueError as error:
        raise UserError(f"tensor {weights.name_of(name)!r} is unreadable: {error}") from None
    return state


def _whole(weights: Checkpoint, name: str, state: _State) -> LazyTensor:
    """Blocks run from row to row: any part is cut from the whole."""
    return LazyTensor(state.shape, lambda cuts: select(_values(weights, name, state), cuts))


def _values(weights: Checkpoint, name: str, state: _State) -> Tensor:
    """The whole matrix; the first of a byte's two codes is in its high half."""
    count = prod(state.shape)
    blocks = -(-count // state.blocksize)
    largest, table = _largest(weights, name, state, blocks), stored_scales(weights, f"{name}.quant_map", (16,)).read()
    # Its bytes may be stored as numbers of any dtype.
    packed = stored_as(weights, name, shape_of(weights, name), "U8", *FLOATS).read().flatten().view(torch.uint8)
    if len(packed) != -(-count // 2):
        raise UserError(f"tensor {weights.name_of(name)!r} has {len(packed)} bytes of the {-(-count // 2)} it needs")
    out = torch.empty(count, dtype=weights.dtype, device=packed.device)
    step = 2 * state.blocksize * max(1, AT_ONCE // (2 * state.blocksize))
    for start in range(0, count, step):
        part, codes = out[start : start + step], packed[start // 2 : (start + step) // 2]
        values = table[torch.stack((codes >> 4, codes & 15), -1).flatten()[: len(part)].int()]
        scales = largest[start // state.blocksize : (start + step) // state.blocksize]
        part.copy_(values.mul_(scales.repeat_interleave(state.blocksize)[: len(part)]))
    return out.view(state.shape)


def _largest(weights: Checkpoint, name: str, state: _State, blocks: int) -> Tensor:
    """fp32, of each block."""
    if state.nested_blocksize is None or state.nested_offset is None:
        return stored_scales(weights, f"{name}.absmax", (blocks,)).read()
    codes = stored_as(weights, f"{name}.absmax", (blocks,), "U8").read()
    scales = stored_scales(weights, f"{name}.nested_absmax", (-(-blocks // state.nested_blocksize),)).read()
    table = stored_scales(weights, f"{name}.nested_quant_map", (256,)).read()
    found = table[codes.int()] * scales.repeat_interleave(state.nested_blocksize)[:blocks] + state.nested_offset
    return finite(weights, f"{name}.nested_absmax", found)
