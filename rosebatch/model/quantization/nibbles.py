"""Integers of 4 bits at most, brought into the order of the kernel that multiplies them."""

import numpy as np
import torch
from torch import Tensor

from rosebatch.model.lazy_tensor import LazyTensor
from rosebatch.model.quantization.packing import AT_ONCE
from rosebatch.ops.int4 import MIDDLE, empty_words, group_size, has_int4_product, int4_linear, pack_
from rosebatch.ops.weight import Device, Linear


def nibble_linear(
    numbers: LazyTensor,
    kind: torch.dtype,
    scales: LazyTensor,
    zeros: LazyTensor | None,
    row_of: np.ndarray,
    group_of: np.ndarray,
    dtype: torch.dtype,
    bias: Tensor | None,
    device: Device,
) -> Linear | None:
    """The product with the codes themselves; None where no kernel serves the matrix or its groups.

    Columns are sorted by group. Codes are a byte each on the way: of some rows at a time.

    Args:
        numbers, kind, scales, zeros, row_of, group_of, dtype: see ``GroupedWeight``; numbers have 4 bits.
        bias, device: see ``Weight.linear``.
    """
    order = np.argsort(group_of, kind="stable")
    group = group_size(group_of[order])
    # Codes begin at 0 and have zeros, or numbers are on both sides of 0.
    if group is None or (kind == torch.int8) != (zeros is None) or not has_int4_product(numbers.shape, dtype):
        return None
    is_sorted = np.array_equal(order, np.arange(len(order)))
    read = scales.read()
    rows, places = (torch.from_numpy(each).to(read.device) for each in (row_of, group_of[order][::group]))

    def spread(grid: Tensor) -> Tensor:
        return grid[rows][:, places].t()

    size, columns = numbers.shape
    codes, words = numbers if is_sorted else numbers.take(-1, order), empty_words(size, columns, read.device)
    step = max(1, AT_ONCE // columns)
    for first in range(0, size, step):
        part = codes.take(-2, range(first, min(first + step, size))).read()
        pack_(words, first, part + MIDDLE if zeros is None else part)
    own_zeros, own_order = None if zeros is None else spread(zeros.read()), None if is_sorted else order
    return int4_linear(words, spread(read), own_zeros, own_order, group, columns, dtype, bias, device)
