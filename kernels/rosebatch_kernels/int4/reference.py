"""PyTorch reference of the product with 4-bit integers."""

import torch
from torch import Tensor

from rosebatch_kernels.int4.layout import MIDDLE, QUARTER, Int4Weight
from rosebatch_kernels.linear import reference


def decode(weight: Int4Weight, dtype: torch.dtype, first: int = 0, count: int | None = None) -> Tensor:
    """``[count, in]`` of the values, computed in fp32 and rounded once.

    Args:
        weight: the matrix.
        dtype: of the values.
        first, count: rows of the matrix; None for all from there on.
    """
    rows = slice(first, None if count is None else first + count)
    words = weight.words[:, rows].int()
    codes = torch.stack([words >> 4 * place & 15 for place in range(4)], 2)
    assert codes.shape[-1] == QUARTER
    codes = codes.permute(1, 0, 2, 3).flatten(1)[:, : weight.columns]
    zeros = MIDDLE if weight.zeros is None else _spread(weight.zeros[:, rows], weight)
    return ((codes - zeros) * _spread(weight.scales[:, rows].float(), weight)).to(dtype)


def linear(x: Tensor, weight: Int4Weight, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """``activation(x @ weightᵀ + bias)`` for ``x [T, in]``, ``weight [out, in]``: see ``linear.reference``."""
    return reference.linear(x, decode(weight, x.dtype), bias, activation)


def parts(x: Tensor, weight: Int4Weight) -> Tensor:
    """``x @ weightᵀ`` in parts ``[S, T, out]`` fp32, which the reader adds up; here in a single part."""
    return reference.parts(x, decode(weight, torch.float32))


def _spread(grid: Tensor, weight: Int4Weight) -> Tensor:
    return grid.repeat_interleave(weight.group, 0)[: weight.columns].t()
