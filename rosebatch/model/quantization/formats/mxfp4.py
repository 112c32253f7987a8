"""MXFP4 as gpt-oss has it: 4-bit floats in blocks that share a power of two (OCP Microscaling Formats v1.0)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from torch import Tensor

from rosebatch.model.lazy_tensor import Cuts, LazyTensor
from rosebatch.model.quantization.grouped import GroupedWeight, in_groups
from rosebatch.model.quantization.packing import E2M1_KIND, unpacked
from rosebatch.model.quantization.stored import POWERS, stored_as, stored_scales
from rosebatch.model.weights import Checkpoint
from rosebatch.ops.layout import Layout

# Values that share a scale, and the bytes that hold them.
_BLOCK, _BLOCK_BYTES = 32, 16


@dataclass(frozen=True, slots=True)
class MXFP4:
    """See ``Form``. ``NAME_blocks [..., out, G, 16]`` and ``NAME_scales [..., out, G]``, both uint8."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """By ``quantization_config``, which says nothing that the tensors do not."""
        return cls()

    @property
    def layouts(self) -> Sequence[Layout]:
        """See ``Form``."""
        return [Layout(4, True, (1, _BLOCK), of_experts=True)]

    def find(self, weights: Checkpoint, name: str, shape: tuple[int, ...]) -> GroupedWeight | None:
        """See ``Form``."""
        if weights.shape(f"{name}_blocks") is None:
            return None
        groups = *shape[:-1], -(-shape[-1] // _BLOCK)
        blocks = stored_as(weights, f"{name}_blocks", (*groups, _BLOCK_BYTES), "U8")
        return GroupedWeight(
            numbers=unpacked(_flat(blocks), 4, -1, shape[-1], 8),
            kind=E2M1_KIND,
            scales=stored_scales(weights, f"{name}_scales", groups, *POWERS),
            zeros=None,
            row_of=np.arange(shape[-2]),
            group_of=in_groups(shape[-1], _BLOCK),
            dtype=weights.dtype,
        )


def _flat(blocks: LazyTensor) -> LazyTensor:
    """``[..., G, B]`` -> ``[..., G · B]``: whole blocks are read."""
    *lead, groups, size = blocks.shape
    last = len(lead)

    def part(cuts: Cuts) -> Tensor:
        wanted = np.asarray(cuts.get(last, range(groups * size)))
        touched, block = np.unique(wanted // size, return_inverse=True)
        found = blocks.part({**cuts, last: touched}).flatten(-2)
        return LazyTensor.of(found).take(-1, block * size + wanted % size).read()

    return LazyTensor((*lead, groups * size), part)
