"""A product of each head with a matrix of its own in Triton: tiles are fixed, so no other row changes a row's bits."""

import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.dot import dot
from rosebatch_kernels.common.launch import launch_options, wait

# Of a tile: rows, columns and depth, for fp32 with half of each.
_ROWS, _COLUMNS, _DEPTH = 32, 64, 64


class FixedHeads:
    """See ``rosebatch_kernels.linear.each_head.HeadProducts``.

    Args:
        weight: ``[heads, out, in]``.
        device: the GPU's record.
    """

    def __init__(self, weight: Tensor, device: Device) -> None:
        self.weight = weight.contiguous()
        self.device = device

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """``x [T, heads, in] -> [T, heads, out]``, both with rows and heads at any stride."""
        heads, size_out, size_in = self.weight.shape
        if out is None:
            out = x.new_empty(len(x), heads, size_out)
        assert x.stride(2) == out.stride(2) == 1, "the last axis is contiguous"
        share = 2 if x.dtype.itemsize == 4 else 1
        rows, columns = _ROWS // share, _COLUMNS // share
        _each_head[(heads, triton.cdiv(len(x), rows), triton.cdiv(size_out, columns))](
            x=x,
            weight=self.weight,
            out=out,
            count=len(x),
            x_stride=x.stride(0),
            x_head=x.stride(1),
            out_stride=out.stride(0),
            out_head=out.stride(1),
            OUT=size_out,
            IN=size_in,
            ROWS=rows,
            COLUMNS=columns,
            DEPTH=_DEPTH // share,
            num_warps=4,
            **launch_options(self.device),
        )
        return out


@triton.jit(do_not_specialize=["count"])
def _each_head(
    x,
    weight,
    out,
    count,
    x_stride,
    x_head,
    out_stride,
    out_head,
    OUT: tl.constexpr,
    IN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        wait()
    head = tl.program_id(0).to(tl.int64)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[:, None]
    x_rows = x + row * x_stride + head * x_head
    w_rows = weight + (head * OUT + column) * IN
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in tl.range(0, IN, DEPTH):
        k = first + tl.arange(0, DEPTH)[None, :]
        a = tl.load(x_rows + k, mask=(row < count) & (k < IN), other=0.0)
        b = tl.load(w_rows + k, mask=(column < OUT) & (k < IN), other=0.0)
        acc = dot(a, tl.trans(b), acc)
    to = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    there = (row < count) & (to < OUT)
    tl.store(out + row * out_stride + head * out_head + to, acc.to(out.dtype.element_ty), mask=there)
