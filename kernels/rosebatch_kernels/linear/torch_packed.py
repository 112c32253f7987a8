"""The matrix product on a CPU with the weight kept in oneDNN's own blocked layout.

A plain call re-lays the weight every time: the 30 layers of SmolLM2-135M take 27 ms instead of 17 ms for 32 rows, in
bf16 with AMX on two cores (benchmarks/NOTEBOOK/2026-11.md).

``invariant=True`` makes a row's result independent of the other rows. oneDNN picks its blocking, and so the order of
the additions, by the number of rows. In fp32, with a layout for a single row, all numbers of rows but one give the same
bits (tests/kernels/test_linear.py). In bf16 that depends on the weight's size and on the number of threads: the rows
are padded to one of a few numbers. A trial finds those that add in the same order as the largest.
"""

import functools

import torch
from torch import Tensor
from torch.nn import functional

from rosebatch_kernels.linear.interface import Linear

# The layout is made for this many rows: a decode batch, where the weight's layout matters most.
_LAYOUT_ROWS = 32
_INVARIANT_LAYOUT_ROWS = 1
# Numbers of rows in bf16. Fewer than 16 take as long as 16, the height of a matrix instruction's tile.
_INVARIANT_ROWS = (16, 32, 48, 64, 96, 128)


def can_pack(weight: Tensor) -> bool:
    """Whether this PyTorch, device and dtype have a packed layout: oneDNN has none in bf16 without AVX-512."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and (weight.dtype == torch.float32 or torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class PackedLinear(Linear):
    """``x [T, in] -> [T, out]`` with ``weight [out, in]`` and an optional ``bias [out]``; the weight is copied."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, invariant: bool = False) -> None:
        rows = _INVARIANT_LAYOUT_ROWS if invariant else _LAYOUT_ROWS
        self.weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
        self.bias = bias
        self.shape = (weight.shape[0], weight.shape[1])
        self.invariant = invariant

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return self._tiled(x, self.bias)

    def product(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return self._tiled(x, None)

    def _tiled(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if not self.invariant:
            return self._product(x, bias)
        if x.dtype != torch.bfloat16:
            return self._padded(x, bias, max(len(x), 2))
        allowed = _agreeing_rows(*self.shape, bias is not None, torch.get_num_threads())
        limit = allowed[-1]
        parts = x.split(limit) if len(x) > limit else (x,)
        outs = [self._padded(part, bias, next(rows for rows in allowed if rows >= len(part))) for part in parts]
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _padded(self, x: Tensor, bias: Tensor | None, rows: int) -> Tensor:
        if len(x) == rows:
            return self._product(x, bias)
        return self._product(functional.pad(x, (0, 0, 0, rows - len(x))), bias)[: len(x)]

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, bias, "none", [], "")
        return out


@functools.cache
def _agreeing_rows(size_out: int, size_in: int, bias: bool, threads: int) -> tuple[int, ...]:
    """The ``_INVARIANT_ROWS`` that give the same bits as the largest, for a bf16 weight ``[size_out, size_in]``.

    The trial uses sums that are zero except for rounding: another order of the additions shows in each of them. The
    library's choice depends on ``threads``, the number that PyTorch uses at the time of the call.
    """
    generator = torch.Generator().manual_seed(0)
    half, odd = divmod(size_in, 2)
    positive = torch.randn(_INVARIANT_ROWS[-1], half, generator=generator).bfloat16()
    x = functional.pad(torch.cat([positive, -positive], dim=1), (0, odd))
    few = torch.randn(min(size_out, 64), half, generator=generator).bfloat16()
    repeated = functional.pad(torch.cat([few, few], dim=1), (0, odd)).repeat(-(-size_out // len(few)), 1)
    weight = repeated[:size_out]
    product = PackedLinear(weight, invariant=True)._product
    zeros = torch.zeros(size_out, dtype=torch.bfloat16) if bias else None
    expected = product(x, zeros)
    return tuple(rows for rows in _INVARIANT_ROWS if torch.equal(product(x[:rows], zeros), expected[:rows]))
