"""Rows of the norms' input, which has several forms: where a kernel finds them."""

from typing import NamedTuple

from torch import Tensor


class Rows(NamedTuple):
    """Where the rows of a norm's input lie.

    Attributes:
        number: rows of the result; each head is one.
        heads: heads of each token, 1 if the input has no axis of heads.
        parts: parts of each row that are added up first.
        stride: elements from a token to the next.
        inner_stride: elements from a head, or a part, to the next.
    """

    number: int
    heads: int
    parts: int
    stride: int
    inner_stride: int


def rows_of(x: Tensor, residual: Tensor | None) -> Rows:
    """Rows of ``x``: ``[T, H]``; ``[T, heads, H]`` without a residual; ``[S, T, H]``, S parts, with one."""
    assert x.stride(-1) == 1 and (residual is None or residual.stride(-1) == 1), "the last axis is contiguous"
    if x.ndim == 2:
        return Rows(len(x), 1, 1, x.stride(0), 0)
    if residual is not None:
        return Rows(len(residual), 1, len(x), x.stride(1), x.stride(0))
    return Rows(len(x) * x.shape[1], x.shape[1], 1, x.stride(0), x.stride(1))
