"""Integers of at most 4 bits of a matrix, as the kernel for its product reads them."""

import numpy as np
import torch
from torch import Tensor

from rosebatch.model.quantization.numbers import GroupedNumbers, groups_of_neighbours
from rosebatch.model.quantization.packing import AT_ONCE
from rosebatch.ops.int4 import GROUPS, Int4Weight, has_int4_product, int4_linear, narrowest
from rosebatch.ops.packed import MIDDLE, empty_words, pack_, piece_of
from rosebatch.ops.weight import Device, Linear


def packed_linear(weight: GroupedNumbers, bias: Tensor | None, device: Device) -> Linear | None:
    """The product with the codes themselves; None where no kernel serves the matrix or its groups.

    Columns are sorted by group. Codes are a byte each on the way: of some rows at a time.

    Args:
        weight: ``[out, in]``, numbers of 4 bits.
        bias, device: see ``Weight.linear``.
    """
    numbers, zeros, dtype = weight.numbers, weight.zeros, weight.dtype
    order = np.argsort(weight.group_of, kind="stable")
    group_of = weight.group_of[order]
    group = next((size for size in GROUPS if groups_of_neighbours(group_of, size) is not None), None)
    # Codes begin at 0 and have zeros, or numbers are on both sides of 0.
    if group is None or (weight.kind == torch.int8) != (zeros is None) or not has_int4_product(numbers.shape, dtype):
        return None
    is_sorted = np.array_equal(order, np.arange(len(order)))
    read = weight.scales.read()
    rows, places = (torch.from_numpy(each).to(read.device) for each in (weight.row_of, group_of[::group]))

    def spread(grid: Tensor) -> Tensor:
        return grid[rows][:, places].t().contiguous()

    size, columns = numbers.shape
    codes = numbers if is_sorted else numbers.take(-1, order)
    words = empty_words(numbers.shape, piece_of("int4"), read.device)
    step = max(1, AT_ONCE // columns)
    for first in range(0, size, step):
        part = codes.take(-2, range(first, min(first + step, size))).read()
        pack_(words[:, first : first + step], part + MIDDLE if zeros is None else part)
    own_zeros = None if zeros is None else spread(zeros.read()).int()
    kept = Int4Weight(words, narrowest(spread(read), dtype), own_zeros, columns, group)
    return int4_linear(kept, None if is_sorted else order, bias, device)
