"""Numbers of few bits that share scales: what most formats of quantized weights come down to."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rosebatch.core.errors import UserError
from rosebatch.host.model_files import shown
from rosebatch.model.lazy_tensor import LazyTensor, join, select, stack
from rosebatch.model.quantization.dense import DenseWeight, values_of
from rosebatch.model.quantization.packing import powers_of_two
from rosebatch.model.weights import WeightSource, lazy_stored
from rosebatch.ops.weight import Indices, Weight

# By safetensors' names: numbers of a byte, and scales that are exponents.
_KINDS = {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_POWERS = ("U8", "F8_E8M0")
# Rows whose values are in memory as fp32 at once.
_ROWS = 2048


@dataclass(frozen=True, slots=True)
class GroupedWeight(Weight):
    """See ``Weight``. A value is ``(number - zero) · scale``; elements of a group share zero and scale.

    Attributes:
        numbers: ``[..., out, in]``, the bytes of integers or of narrow floats.
        kind: dtype of the numbers, of one byte.
        scales: ``[..., R, G]`` floats.
        zeros: ``[..., R, G]``; None if they are 0.
        row_of: ``[out]``, the row of ``scales`` of each row.
        group_of: ``[in]``, the column of ``scales`` of each column.
        dtype: of the run.
    """

    numbers: LazyTensor
    kind: torch.dtype
    scales: LazyTensor
    zeros: LazyTensor | None
    row_of: np.ndarray
    group_of: np.ndarray
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """See ``Weight``."""
        return self.numbers.shape

    def rows(self, indices: Indices) -> "GroupedWeight":
        """See ``Weight``."""
        used, row_of = np.unique(self.row_of[np.asarray(indices)], return_inverse=True)
        return self._with(self.numbers.take(-2, indices), -2, used, row_of=row_of)

    def columns(self, indices: range) -> "GroupedWeight":
        """See ``Weight``."""
        used, group_of = np.unique(self.group_of[np.asarray(indices)], return_inverse=True)
        return self._with(self.numbers.take(-1, indices), -1, used, group_of=group_of)

    def join(self, others: Sequence[Weight]) -> Weight:
        """See ``Weight``: of other formats and groups, the values are joined."""
        weights = self._alike(others)
        if weights is None:
            return DenseWeight(values_of(self)).join(others)
        starts = np.cumsum([0, *(weight.scales.shape[-2] for weight in weights)])
        row_of = np.concatenate([w.row_of + start for w, start in zip(weights, starts, strict=False)])
        return replace(
            self,
            numbers=join([weight.numbers for weight in weights], -2),
            scales=join([weight.scales for weight in weights], -2),
            zeros=self.zeros and join([weight.zeros for weight in weights if weight.zeros], -2),
            row_of=row_of,
        )

    def stack(self, others: Sequence[Weight]) -> Weight:
        """See ``Weight``."""
        weights = self._alike(others)
        if weights is None or any(not np.array_equal(weight.row_of, self.row_of) for weight in weights):
            return DenseWeight(values_of(self)).stack(others)
        return replace(
            self,
            numbers=stack([weight.numbers for weight in weights]),
            scales=stack([weight.scales for weight in weights]),
            zeros=self.zeros and stack([weight.zeros for weight in weights if weight.zeros]),
        )

    def dense(self) -> Tensor:
        """See ``Weight``; of some rows at a time, because fp32 values of all would fill the memory."""
        numbers, scales = self.numbers.read().view(self.kind), self.scales.read().float()
        zeros = scales if self.zeros is None else self.zeros.read().float()
        out = scales.new_empty(self.shape, dtype=self.dtype)
        row_of, group_of = (torch.from_numpy(each).to(out.device) for each in (self.row_of, self.group_of))
        experts = (each.view(-1, *each.shape[-2:]) for each in (out, numbers, scales, zeros))
        for own, own_numbers, own_scales, own_zeros in zip(*experts, strict=True):
            for start in range(0, len(own), _ROWS):
                rows, values = row_of[start : start + _ROWS], own_numbers[start : start + _ROWS].float()
                if self.zeros is not None:
                    values -= own_zeros[rows][:, group_of]
                own[start : start + _ROWS] = values.mul_(own_scales[rows][:, group_of])
        return out

    def _with(self, numbers: LazyTensor, dim: int, used: np.ndarray, **changed: Any) -> "GroupedWeight":
        scales, zeros = self.scales.take(dim, used), self.zeros and self.zeros.take(dim, used)
        return replace(self, numbers=numbers, scales=scales, zeros=zeros, **changed)

    def _alike(self, others: Sequence[Weight]) -> "list[GroupedWeight] | None":
        """This one and the others, if all have the same form and groups of columns."""
        weights = [self, *others]
        alike = [weight for weight in weights if isinstance(weight, GroupedWeight) and self._is_like(weight)]
        return alike if len(alike) == len(weights) else None

    def _is_like(self, other: "GroupedWeight") -> bool:
        same_numbers = self.kind == other.kind and (self.zeros is None) == (other.zeros is None)
        return same_numbers and np.array_equal(self.group_of, other.group_of)


def in_groups(size: int, group: int) -> np.ndarray:
    """The group of each of ``size`` elements, where neighbours make groups of this size; the last may be smaller."""
    return np.arange(size) // group


def scaled(
    weights: WeightSource, name: str, scale: str, shape: tuple[int, ...], block: tuple[int, int] | None = None
) -> GroupedWeight:
    """The numbers ``name`` of one byte, times scales; other arguments as of ``grouped``.

    Raises:
        UserError: the tensors do not go together.
    """
    kind = _KINDS.get(weights.kind(name))
    if kind is None:
        raise UserError(f"tensor {name!r} holds {shown(weights.kind(name))} with scales: that is not supported")
    return grouped(weights, lazy_stored(weights, name, shape), kind, scale, block)


def grouped(
    weights: WeightSource,
    numbers: LazyTensor,
    kind: torch.dtype,
    scale: str,
    block: tuple[int, int] | None = None,
    group_of: np.ndarray | None = None,
) -> GroupedWeight:
    """Numbers with the scales that the checkpoint has by this name.

    Args:
        weights: of the model.
        numbers: ``[..., out, in]`` bytes.
        kind: of the numbers.
        scale: name of the tensor of scales: floats, or powers of two in bytes.
        block: rows and columns that share a scale, cut off at the ends; None: one scale a matrix or a row, or one for
            neighbouring columns of a row, as many as there are scales.
        group_of: see ``GroupedWeight``; None: by the blocks.

    Raises:
        UserError: the shapes do not go together.
    """
    *lead, rows, columns = numbers.shape
    found = weights.shape(scale)
    if found is None:
        raise UserError(f"weights have no tensor {scale!r}")
    count = math.prod(found) // math.prod(lead)
    if block is None:
        block = (rows, columns) if count == 1 else (1, max(1, columns * rows // max(1, count)))
    grid = *lead, -(-rows // block[0]), -(-columns // block[1])
    if math.prod(found) != math.prod(grid):
        raise UserError(f"tensor {scale!r} has shape {shown(found)}, and groups of {shown(block)} need {shown(grid)}")
    return GroupedWeight(
        numbers=numbers,
        kind=kind,
        scales=_floats(weights, scale, found, grid),
        zeros=None,
        row_of=in_groups(rows, block[0]),
        group_of=in_groups(columns, block[1]) if group_of is None else group_of,
        dtype=weights.dtype,
    )


def _floats(weights: WeightSource, name: str, shape: tuple[int, ...], grid: tuple[int, ...]) -> LazyTensor:
    """Scales in the shape of the groups."""
    stored, kind = lazy_stored(weights, name, shape), weights.kind(name)
    whole = LazyTensor(grid, lambda cuts: select(stored.read().view(grid), cuts))
    if kind in _POWERS:
        return whole.map(powers_of_two)
    return whole.map(lambda found: found.view(_KINDS[kind]).float()) if kind in _KINDS else whole
