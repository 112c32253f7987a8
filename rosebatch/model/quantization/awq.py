"""AWQ: integers of 4 bits, packed along the outputs in an order of their own."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import torch

from rosebatch.core.errors import UserError
from rosebatch.host.model_files import shown
from rosebatch.model.lazy_tensor import LazyTensor
from rosebatch.model.quantization.grouped import GroupedWeight, in_groups
from rosebatch.model.quantization.packing import unpacked
from rosebatch.model.weights import WeightSource, lazy_stored

_BITS = 4
# The nibble of a word that holds column 0, 1, ... of eight.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class AWQ:
    """See ``Form``. ``qweight [in, out / 8]``, ``scales [G, out]``, ``qzeros [G, out / 8]``."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """By ``quantization_config`` or ``quant_config.json``.

        Raises:
            ValueError: a field has a value that is not served.
        """
        bits, version = config.get("bits") or config.get("w_bit") or _BITS, config.get("version") or "gemm"
        if bits != _BITS:
            raise ValueError(f"quantization_config: bits {shown(bits)} is not supported for awq")
        if str(version).lower() != "gemm":
            raise ValueError(f"quantization_config: version {shown(version)} is not supported")
        if config.get("zero_point") is False:
            raise ValueError("quantization_config: zero_point false is not supported")
        return cls()

    def find(self, weights: WeightSource, name: str, shape: tuple[int, ...]) -> GroupedWeight | None:
        """See ``Form``. Lists of modules are not checked: entries are parts of names, and match others too."""
        own = name.removesuffix("weight")
        groups = weights.shape(f"{own}scales")
        if weights.shape(f"{own}qweight") is None or len(shape) != 2:
            return None
        rows, columns = shape
        if groups is None or len(groups) != 2:
            raise UserError(f"tensor {f'{own}scales'!r} has shape {shown(groups)}: [groups, {rows}] is supported")
        return GroupedWeight(
            numbers=_codes(weights, f"{own}qweight", columns, rows),
            kind=torch.uint8,
            scales=lazy_stored(weights, f"{own}scales", (groups[0], rows)).transposed(),
            zeros=_codes(weights, f"{own}qzeros", groups[0], rows),
            row_of=np.arange(rows),
            group_of=in_groups(columns, -(-columns // groups[0])),
            dtype=weights.dtype,
        )


def _codes(weights: WeightSource, name: str, height: int, rows: int) -> LazyTensor:
    """``[height, rows / 8]`` words -> ``[rows, height]``."""
    words = lazy_stored(weights, name, (height, -(-rows // len(_PLACES))))
    order = (np.arange(0, rows, len(_PLACES))[:, None] + np.array(_PLACES)).flatten()
    return unpacked(words, _BITS, -1, rows, 32).take(-1, order).transposed()
