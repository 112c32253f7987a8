"""Weights of few bits that share scales: what most formats come down to."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rosebatch.core.errors import UserError
from rosebatch.host.model_files import shown
from rosebatch.model.lazy_tensor import LazyTensor, join, stack
from rosebatch.model.quantization.dense import DenseWeight, values_of
from rosebatch.model.quantization.numbers import GroupedNumbers, groups_of_neighbours
from rosebatch.model.quantization.packed_experts import packed_experts
from rosebatch.model.quantization.packed_linear import packed_linear
from rosebatch.model.quantization.packing import AT_ONCE, floats
from rosebatch.model.quantization.stored import POWERS, shape_of, stored_as, stored_scales
from rosebatch.model.weights import FLOATS, Checkpoint
from rosebatch.ops.fp8 import BLOCK, fp8_linear, has_fp8_product
from rosebatch.ops.weight import Device, Indices, Linear, Packed, Weight

# Bits of the largest numbers that are kept as integers.
_NIBBLE = 4
# Numbers of a byte, by safetensors' names.
_KINDS = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8}
# Scales of a byte, and the elements that share one: OCP Microscaling Formats v1.0, and NVFP4.
_BLOCKS = {"U8": (1, 32), "F8_E4M3": (1, 16)}


@dataclass(frozen=True, slots=True)
class GroupedWeight(GroupedNumbers, Weight):
    """See ``Weight`` and ``GroupedNumbers``."""

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

    def is_like(self, other: Weight) -> bool:
        """See ``Weight``: of one kind, with the same groups of columns."""
        if not isinstance(other, GroupedWeight):
            return False
        same_numbers = self.kind == other.kind and (self.zeros is None) == (other.zeros is None)
        same_bits = (self.bits <= _NIBBLE) == (other.bits <= _NIBBLE)
        same_groups = self.scales.shape[-1] == other.scales.shape[-1]
        return same_numbers and same_bits and same_groups and np.array_equal(self.group_of, other.group_of)

    def join(self, others: Sequence["GroupedWeight"]) -> "GroupedWeight":
        """See ``Weight``."""
        weights = [self, *others]
        starts = np.cumsum([0, *(weight.scales.shape[-2] for weight in weights)])
        row_of = np.concatenate([w.row_of + start for w, start in zip(weights, starts, strict=False)])
        return replace(
            self,
            numbers=join([weight.numbers for weight in weights], -2),
            scales=join([weight.scales for weight in weights], -2),
            zeros=self.zeros and join([weight.zeros for weight in weights if weight.zeros], -2),
            row_of=row_of,
            bits=max(weight.bits for weight in weights),
        )

    def stack(self, others: Sequence[Weight]) -> Weight:
        """See ``Weight``."""
        alike = [each for each in others if isinstance(each, GroupedWeight) and self.is_like(each)]
        weights = [self, *alike]
        if len(alike) < len(others) or any(not np.array_equal(weight.row_of, self.row_of) for weight in weights):
            return DenseWeight(values_of(self)).stack(others)
        return replace(
            self,
            numbers=stack([weight.numbers for weight in weights]),
            scales=stack([weight.scales for weight in weights]),
            zeros=self.zeros and stack([weight.zeros for weight in weights if weight.zeros]),
        )

    def dense(self) -> Tensor:
        """See ``Weight``; of some rows at a time, because fp32 values of all would fill the memory."""
        numbers, scales = self.numbers.read(), self.scales.read()
        zeros = scales if self.zeros is None else self.zeros.read().float()
        out = scales.new_empty(self.shape, dtype=self.dtype)
        if out.is_meta:
            return out
        row_of, group_of = (torch.from_numpy(each).to(out.device) for each in (self.row_of, self.group_of))
        experts = (each.view(-1, *each.shape[-2:]) for each in (out, numbers, scales, zeros))
        for own, own_numbers, own_scales, own_zeros in zip(*experts, strict=True):
            step = max(1, AT_ONCE // max(1, self.shape[-1]))
            for start in range(0, len(own), step):
                rows, values = row_of[start : start + step], floats(own_numbers[start : start + step], self.kind)
                if self.zeros is not None:
                    values -= own_zeros[rows][:, group_of]
                own[start : start + step] = values.mul_(own_scales[rows][:, group_of])
        return out

    def linear(self, bias: Tensor | None, device: Device | None) -> Linear | None:
        """See ``Weight``; integers of 4 bits at most, and e4m3."""
        if device is None:
            return None
        return packed_linear(self, bias, device) if self.bits <= _NIBBLE else self._fp8_linear(bias, device)

    def _fp8_linear(self, bias: Tensor | None, device: Device) -> Linear | None:
        """The product of e4m3 with scales of rows or of the kernels' blocks; None of others."""
        is_plain = self.kind == torch.float8_e4m3fn and self.zeros is None
        if not is_plain or not has_fp8_product(self.shape, self.dtype, device):
            return None
        of_rows = self.scales.shape[1] == 1
        rows = self.row_of if of_rows else groups_of_neighbours(self.row_of, BLOCK)
        columns = groups_of_neighbours(self.group_of, BLOCK)
        if rows is None or columns is None:
            return None
        # What is rounded at load has scales once it has numbers.
        numbers, scales = self.numbers.read().view(self.kind), self.scales.read()
        scales = scales.index_select(0, torch.from_numpy(rows).to(scales.device))
        scales = scales[:, 0] if of_rows else scales.index_select(1, torch.from_numpy(columns).to(scales.device))
        return fp8_linear(numbers, scales, bias, device)

    def experts(self) -> Packed | None:
        """See ``Weight``."""
        return packed_experts(self)

    def _with(self, numbers: LazyTensor, dim: int, used: np.ndarray, **changed: Any) -> "GroupedWeight":
        scales, zeros = self.scales.take(dim, used), self.zeros and self.zeros.take(dim, used)
        return replace(self, numbers=numbers, scales=scales, zeros=zeros, **changed)


def in_groups(size: int, group: int) -> np.ndarray:
    """The group of each of ``size`` elements, where neighbours make groups of this size; the last may be smaller."""
    return np.arange(size) // group


def coded(weights: Checkpoint, codes: LazyTensor, bits: int, scale: str, group: int | None) -> GroupedWeight:
    """Codes, which begin at 0, with scales ``[G, out]``; zeros are not yet there.

    Args:
        weights: of the model.
        codes: ``[out, in]``, a byte each.
        bits: of a code.
        scale: name of the tensor of scales.
        group: neighbouring columns that share a scale, -1: all; None: as many as there are scales for.

    Raises:
        UserError: there are other numbers of scales.
    """
    (rows, columns), found = codes.shape, shape_of(weights, scale)
    count = found[0] if len(found) == 2 else 0
    size = columns if group == -1 else group or -(-columns // max(1, count))
    # Groups of a size that is not known are all as large.
    if count != -(-columns // size) or (group is None and columns % count):
        where = f"quantization_config: group_size is {group}, and " if group else ""
        raise UserError(f"{where}{weights.name_of(scale)!r} of {columns} columns has shape {shown(found)}")
    return GroupedWeight(
        numbers=codes,
        kind=torch.uint8,
        scales=stored_scales(weights, scale, (count, rows)).transposed(),
        zeros=None,
        row_of=np.arange(rows),
        group_of=in_groups(columns, size),
        dtype=weights.dtype,
        bits=bits,
    )


def symmetric(codes: GroupedWeight) -> GroupedWeight:
    """Codes as numbers on both sides of 0: half of their range is subtracted."""
    half = 1 << (codes.bits - 1)
    return replace(codes, numbers=codes.numbers.map(lambda read: read - half), kind=torch.int8)


def scaled(
    weights: Checkpoint,
    name: str,
    scale: str,
    shape: tuple[int, ...],
    block: tuple[int, int] | None = None,
    kinds: Sequence[str] = ("F8_E4M3",),
) -> GroupedWeight:
    """The numbers ``name`` of one byte, times scales; other arguments as of ``grouped``.

    Args:
        weights, name, scale, shape, block: see ``grouped``.
        kinds: of numbers, by safetensors' names.

    Raises:
        UserError: the tensors do not go together.
    """
    numbers = stored_as(weights, name, shape, *kinds)
    return grouped(weights, numbers, _KINDS[weights.kind(name)], scale, block)


def grouped(
    weights: Checkpoint,
    numbers: LazyTensor,
    kind: torch.dtype,
    scale: str,
    block: tuple[int, int] | None = None,
) -> GroupedWeight:
    """Numbers with the scales that the checkpoint has by this name.

    Args:
        weights: of the model.
        numbers: ``[..., out, in]`` bytes.
        kind: of the numbers.
        scale: name of the tensor of scales: floats, or powers of two in bytes.
        block: rows and columns that share a scale, 0 for all, cut off at the ends; None: one scale a matrix or a row,
            and a power of two as the standard has it.

    Raises:
        UserError: the tensors do not go together.
    """
    *lead, rows, columns = numbers.shape
    found = shape_of(weights, scale)
    if block is None:
        block = _BLOCKS.get(weights.kind(scale)) or (0 if math.prod(found) == math.prod(lead) else 1, 0)
    block = block[0] or rows, block[1] or columns
    kinds = [name for name in dict.fromkeys((*FLOATS, *POWERS, *_BLOCKS)) if _BLOCKS.get(name, block) == block]
    grid = *lead, -(-rows // block[0]), -(-columns // block[1])
    if _without_last_ones(found) != _without_last_ones(grid):
        what = f"groups of {shown(block)} need scales of shape {shown(grid)}"
        raise UserError(f"quantization_config: {what}, and tensor {weights.name_of(scale)!r} has {shown(found)}")
    return GroupedWeight(
        numbers=numbers,
        kind=kind,
        scales=stored_scales(weights, scale, found, *kinds, grid=grid),
        zeros=None,
        row_of=in_groups(rows, block[0]),
        group_of=in_groups(columns, block[1]),
        dtype=weights.dtype,
    )


def _without_last_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Last dimensions of one element may be there or not; a first one would make columns of rows."""
    count = len(shape)
    while count and shape[count - 1] == 1:
        count -= 1
    return shape[:count]
