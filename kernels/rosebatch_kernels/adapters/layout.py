"""A and B of all adapters for one product, and the rows of a step by adapter."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rosebatch_kernels.common.order import Order

# Outputs of a program at most.
TILE = 256


class Stack(NamedTuple):
    """What each of N adapters adds to a product: ``B A x``.

    A product of several projections, such as q, k and v, has a part for each. All parts have as many ranks: those that
    an adapter lacks are zeros.

    Attributes:
        a: ``[N, P · r, in]``, contiguous, one part below the other; r is a multiple of 16.
        b: ``[N, out, r]``, contiguous: each output has the ranks of its own part. The scale is in it.
        columns: ``[M, 3]`` int32, neighbours among the outputs: first, end and part; at most ``TILE`` each.
        alignment: a power of two up to 16 that divides all first columns and ends.
        is_gated: whether the outputs are a gate and as many that it multiplies, which are the first and the last part.
    """

    a: Tensor
    b: Tensor
    columns: Tensor
    alignment: int
    is_gated: bool

    @property
    def num_parts(self) -> int:
        """P."""
        return self.a.shape[1] // self.b.shape[2]

    @classmethod
    def of(cls, a: Tensor, b: Tensor, parts: Sequence[int]) -> "Stack":
        """With A and B; ``parts [out]`` are those of the outputs."""
        columns = columns_of(parts)
        alignment = math.gcd(16, *(number for first, end, _ in columns for number in (first, end)))
        there = torch.tensor(columns, dtype=torch.int32, device=a.device)
        return cls(a, b, there, alignment, is_gated(parts))


class Rows(NamedTuple):
    """The rows of a step.

    Attributes:
        adapters: ``[T]`` int32, the adapter of each, counted from 1; 0 for none.
        order: by adapter.
        tile_rows: of a tile.
    """

    adapters: Tensor
    order: Order
    tile_rows: int


def columns_of(parts: Sequence[int]) -> list[tuple[int, int, int]]:
    """``Stack.columns`` of outputs that belong to these parts."""
    found, first = list[tuple[int, int, int]](), 0
    for place in range(1, len(parts) + 1):
        if place == len(parts) or parts[place] != parts[first]:
            found += [(begin, min(begin + TILE, place), parts[first]) for begin in range(first, place, TILE)]
            first = place
    return found


def is_gated(parts: Sequence[int]) -> bool:
    """Whether the outputs of these parts are two halves, one part each, or of one part all."""
    half = len(parts) // 2
    halves = [0] * half + [max(parts)] * half
    return max(parts) <= 1 and [*parts] == halves
