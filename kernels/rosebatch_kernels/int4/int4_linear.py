"""The matrix product on a GPU with a weight of 4-bit integers, and the operators that follow it."""

from collections.abc import Iterator

import torch
from torch import Tensor

from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.sizes import value_at
from rosebatch_kernels.int4 import kernel
from rosebatch_kernels.int4.decode import decode_
from rosebatch_kernels.int4.layout import Int4Weight
from rosebatch_kernels.int4.sizes import Sizes, splits_of
from rosebatch_kernels.int4.sum_parts import sum_parts
from rosebatch_kernels.linear.interface import Linear

# Rows of the weight that are decoded at a time are a multiple of these.
_ROWS = 128


class Int4Linear(Linear):
    """``x [T, in] -> [T, out]`` in a 16-bit type. Few rows are multiplied with the codes, many with decoded values.

    Args:
        weight: ``[out, in]``.
        bias: ``[out]``, or None.
        order: ``[in]``, the column of x of each column of the weight; None if they have the same order.
        sizes, device: of programs.
    """

    def __init__(
        self, weight: Int4Weight, bias: Tensor | None, order: Tensor | None, *, sizes: Sizes, device: Device
    ) -> None:
        self.weight = weight
        self.bias = bias
        self._order = order
        self._sizes = sizes
        self._device = device

    def in_one_order(self) -> Linear:
        """See ``Linear``."""
        return Int4Linear(self.weight, self.bias, self._order, sizes=self._sizes.invariant(), device=self._device)

    def divides(self, x: Tensor) -> bool:
        """See ``Linear``."""
        return len(x) <= self._sizes.max_rows_in_parts

    def activates(self, x: Tensor, activation: str) -> bool:
        """See ``Linear``."""
        return self._is_few(x)

    def adds_in_place(self, x: Tensor) -> bool:
        """See ``Linear``."""
        return len(x) >= self._sizes.min_rows_onto and self.bias is None

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return self._multiply(x, self.bias)

    def product(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return self._multiply(x, None)

    def parts(self, x: Tensor) -> Tensor:
        """See ``kernel.parts``."""
        return kernel.parts(self._ordered(x), self.weight, sizes=self._sizes, device=self._device)

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """See ``kernel.linear``."""
        x = self._ordered(x)
        return kernel.linear(x, self.weight, self.bias, activation, sizes=self._sizes, device=self._device)

    def add_(self, x: Tensor, onto: Tensor) -> Tensor:
        """See ``Linear``."""
        x = self._ordered(x)
        for rows, values in self._decoded(x):
            onto[:, rows].addmm_(x, values.t())
        return onto

    def _multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if self._sums_parts(x):
            return sum_parts(self.parts(x), bias, x.dtype, device=self._device)
        x = self._ordered(x)
        if self._is_few(x):
            return kernel.linear(x, self.weight, bias, sizes=self._sizes, device=self._device)
        out = x.new_empty(len(x), self.weight.shape[0])
        for rows, values in self._decoded(x):
            if bias is None:
                torch.mm(x, values.t(), out=out[:, rows])
            else:
                torch.addmm(bias[rows], x, values.t(), out=out[:, rows])
        return out

    def _sums_parts(self, x: Tensor) -> bool:
        sizes, rows = self._sizes, len(x)
        return splits_of(rows, self.weight, x.dtype, sizes=sizes) >= value_at(sizes.min_summed, rows)

    def _is_few(self, x: Tensor) -> bool:
        return len(x) <= self._sizes.max_rows

    def _ordered(self, x: Tensor) -> Tensor:
        return x if self._order is None else x.index_select(1, self._order)

    def _decoded(self, x: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Some rows of the weight after the other, and their values, which the next ones overwrite."""
        size, columns = self.weight.shape
        limit = max(1, self._sizes.scratch // (columns * x.itemsize * _ROWS)) * _ROWS
        step = -(-size // -(-size // limit) // _ROWS) * _ROWS
        scratch = x.new_empty(min(step, size), columns)
        for first in range(0, size, step):
            values = scratch[: size - first]
            decode_(values, self.weight, first, sizes=self._sizes, device=self._device)
            yield slice(first, first + len(values)), values
