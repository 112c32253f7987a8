"""bitsandbytes: 4-bit codes of a table, in blocks of a flattened matrix, and 8-bit integers."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from rosebatch.core.errors import UserError
from rosebatch.host.model_files import shown
from rosebatch.model.lazy_tensor import LazyTensor, select
from rosebatch.model.quantization.dense import DenseWeight
from rosebatch.model.quantization.grouped import scaled
from rosebatch.model.weights import WeightSource
from rosebatch.ops.weight import Weight

# Of 8-bit integers, whose scales are the largest values of rows.
_LARGEST = 127
_STATES = ("nf4", "fp4")


@dataclass(frozen=True, slots=True)
class BitsAndBytes:
    """See ``Form``."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """By ``quantization_config``, which says nothing that the tensors do not."""
        return cls()

    def find(self, weights: WeightSource, name: str, shape: tuple[int, ...]) -> Weight | None:
        """See ``Form``."""
        rows = f"{name.removesuffix('weight')}SCB"
        if weights.shape(rows) is not None:
            found = scaled(weights, name, rows, shape, (1, shape[-1]))
            return replace(found, scales=found.scales.map(lambda read: read / _LARGEST))
        for kind in _STATES:
            state = f"{name}.quant_state.bitsandbytes__{kind}"
            if (size := weights.shape(state)) is not None:
                fields = json.loads(weights.on_host(state, size).tobytes())
                if tuple(fields["shape"]) != shape:
                    raise UserError(f"tensor {name!r} has shape {shown(fields['shape'])}, config says {shape}")
                return DenseWeight(_whole(weights, name, fields))
        return None


def _whole(weights: WeightSource, name: str, state: Mapping[str, Any]) -> LazyTensor:
    """Blocks run from row to row: any part is cut from the whole."""
    return LazyTensor(tuple(state["shape"]), lambda cuts: select(_values(weights, name, state), cuts))


def _values(weights: WeightSource, name: str, state: Mapping[str, Any]) -> Tensor:
    """The whole matrix; the first of a byte's two codes is in its high half."""

    def read(end: str) -> Tensor:
        found = f"{name}{end}"
        return weights.stored(found, weights.shape(found) or ())

    largest = read(".absmax")
    if "nested_blocksize" in state:
        scales = read(".nested_absmax").repeat_interleave(state["nested_blocksize"])[: len(largest)]
        largest = read(".nested_quant_map")[largest.int()] * scales + state["nested_offset"]
    packed = read("").flatten()
    codes = torch.stack((packed >> 4, packed & 15), -1).flatten()[: torch.Size(state["shape"]).numel()]
    values = read(".quant_map")[codes.int()].float()
    scales = largest.float().repeat_interleave(state["blocksize"])[: len(codes)]
    return values.mul_(scales).to(weights.dtype).view(state["shape"])
