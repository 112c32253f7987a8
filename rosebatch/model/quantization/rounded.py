"""Matrices of floats that a run rounds while it loads them, and random ones in the layout of a checkpoint."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from rosebatch.model.lazy_tensor import Cuts, LazyTensor, select
from rosebatch.model.quantization.dense import DenseWeight
from rosebatch.model.quantization.grouped import GroupedWeight, in_groups
from rosebatch.model.quantization.packing import AT_ONCE, E2M1_KIND
from rosebatch.model.random_weights import DEVIATION
from rosebatch.model.weights import Rounding
from rosebatch.ops.fp8 import LARGEST, MIN_SCALE, scales_of
from rosebatch.ops.layout import Layout
from rosebatch.ops.weight import Weight

_E4M3 = torch.float8_e4m3fn
# A standard deviation of random numbers, as a share of the largest.
_SPREAD = 1 / 4
# The codes of 0, 1, 2 and 3 as 4-bit floats.
_E2M1_CODES = (0, 2, 4, 5)


class _Rows:
    """fp8 numbers and scales of the rows of a matrix: a scale is that of the whole row, whichever part is wanted.

    The rows are read once if their numbers are wanted before their scales.
    """

    def __init__(self, values: LazyTensor) -> None:
        self.values = values
        self.last = len(values.shape) - 1
        self.known: Tensor | None = None

    def numbers(self, cuts: Cuts) -> Tensor:
        """The bytes."""
        rows = self.values.part({dim: cuts[dim] for dim in cuts if dim != self.last})
        out, scales = torch.empty_like(rows, dtype=_E4M3), rows.new_empty((*rows.shape[:-1], 1), dtype=torch.float32)
        flat = rows.flatten(0, -2), out.view(-1, out.shape[-1]), scales.view(-1, 1)
        for part, numbers, scale in zip(*(each.split(max(1, AT_ONCE // rows.shape[-1])) for each in flat), strict=True):
            wide = part.float()
            scale.copy_(scales_of(wide.abs().amax(1, keepdim=True), MIN_SCALE))
            numbers.copy_(wide / scale)
        if self.known is None:
            self.known = scales.new_full((*self.values.shape[:-1], 1), torch.nan)
        self.known[self._places(cuts)] = scales
        own = {dim: indices for dim, indices in cuts.items() if dim == self.last}
        return select(out.view(torch.uint8), own)

    def scales(self, cuts: Cuts) -> Tensor:
        """fp32, ``[..., out, 1]``."""
        cuts = {dim: indices for dim, indices in cuts.items() if dim != self.last}
        places = self._places(cuts)
        if self.known is None or self.known[places].isnan().any():
            self.numbers(cuts)
        assert self.known is not None, "rows that were read have scales"
        return self.known[places]

    def _places(self, cuts: Cuts) -> tuple[Tensor, ...]:
        wanted = [np.asarray(cuts.get(dim, range(size))) for dim, size in enumerate(self.values.shape[:-1])]
        return tuple(map(torch.from_numpy, np.ix_(*wanted)))


def in_fp8(values: LazyTensor, dtype: torch.dtype) -> GroupedWeight:
    """A matrix as e4m3 with a scale for each row, the largest value of the row over 448.

    Args:
        values: ``[..., out, in]``.
        dtype: of the run.
    """
    rows, (*lead, out, width) = _Rows(values), values.shape
    return GroupedWeight(
        numbers=LazyTensor(values.shape, rows.numbers),
        kind=_E4M3,
        scales=LazyTensor((*lead, out, 1), rows.scales),
        zeros=None,
        row_of=np.arange(out),
        group_of=np.zeros(width, dtype=np.int64),
        dtype=dtype,
    )


def random_in(layouts: Sequence[Layout], device: torch.device) -> Rounding | None:
    """What makes random matrices numbers of the first layout, all with the same scale; None if there is none."""
    return partial(_in_layout, layouts[0], device) if layouts else None


def _in_layout(layout: Layout, device: torch.device, values: LazyTensor, dtype: torch.dtype) -> Weight:
    *lead, rows, columns = values.shape
    if layout.of_experts and not lead:
        return DenseWeight(values)
    block = layout.block[0] or rows, layout.block[1] or columns
    half = 1 << (layout.bits - 1)
    is_narrow = layout.floats and layout.bits == 4
    largest = half - 1 if not layout.floats else len(_E2M1_CODES) - 1 if is_narrow else LARGEST
    # A power of two, as scales of most 4-bit floats are.
    scale = 2.0**-5 if is_narrow else DEVIATION / (largest * _SPREAD)
    if not layout.floats:
        # Scales of integers have the dtype of activations.
        scale = float(torch.tensor(scale, dtype=dtype))

    def numbers(read: Tensor) -> Tensor:
        found = (read.float() / scale).clamp_(-largest, largest)
        if is_narrow:
            codes = torch.tensor(_E2M1_CODES, dtype=torch.uint8, device=found.device)[found.abs().round_().int()]
            return codes | (found < 0).to(torch.uint8) << 3
        if layout.floats:
            return found.to(_E4M3).view(torch.uint8)
        found = found.round_().to(torch.int8)
        return (found + half if layout.zeros else found).view(torch.uint8)

    row_of, group_of = in_groups(rows, block[0]), in_groups(columns, block[1])
    scales = torch.full((*lead, int(row_of[-1]) + 1, int(group_of[-1]) + 1), scale, device=device)
    return GroupedWeight(
        numbers=values.map(numbers),
        kind=E2M1_KIND if is_narrow else _E4M3 if layout.floats else torch.uint8 if layout.zeros else torch.int8,
        scales=LazyTensor.of(scales),
        zeros=LazyTensor.of(torch.full_like(scales, half)) if layout.zeros else None,
        row_of=row_of,
        group_of=group_of,
        dtype=dtype,
        bits=8 if layout.floats else layout.bits,
    )
