"""Products of one input with several weights, next to each other."""

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from rosebatch_kernels.linear.interface import Linear


class JoinedLinear(Linear):
    """``x [T, in] -> [T, out]``, the results of linears of so many outputs each."""

    def __init__(self, linears: Sequence[Linear], sizes: Sequence[int], bias: Tensor | None) -> None:
        self.linears = linears
        self.bias = bias
        self._ends = list(accumulate(sizes))

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return torch.cat([linear(x) for linear in self.linears], 1)

    def product(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return torch.cat([linear.product(x) for linear in self.linears], 1)

    def split(self, x: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
        """See ``Linear``; nothing is copied if no piece is of two linears."""
        ends = list(accumulate(sizes))
        if not set(self._ends) <= set(ends):
            return super().split(x, sizes)
        pieces: list[Tensor] = []
        for linear, end in zip(self.linears, self._ends, strict=True):
            pieces += linear(x).split([*sizes[len(pieces) : ends.index(end) + 1]], 1)
        return pieces
