"""fp8 products in Triton, exact sums: of few rows at the speed of reading the weight, of others where PyTorch has none.

Hopper's matrix instruction adds up fp8 products in some 14 bits: of 8192 positive ones, 15 % were lost. So it adds up
128 columns at most, and its sums are added in fp32, where scales of blocks are applied too (source: DeepSeek-V3).

The weight's rows are rows of the matrix instruction, which takes no fewer than 64. The rows of x are its columns, of
which it takes 16. Programs request their part of the weight while their predecessor is still running.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.dot import dot
from rosebatch_kernels.common.launch import LINE, launch_options, lines_of, prefetch, wait
from rosebatch_kernels.common.sizes import value_at
from rosebatch_kernels.common.whole_numbers import cdiv
from rosebatch_kernels.fp8.reference import BLOCK
from rosebatch_kernels.fp8.sizes import Sizes, share_of_parts

_LINE = tl.constexpr(LINE)


def linear(
    numbers: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    *,
    sizes: Sizes,
    device: Device,
) -> Tensor:
    """See ``reference.linear``. Weight and numbers are contiguous, ``in`` is a multiple of 16."""
    out = torch.empty(len(numbers), len(weight), dtype=dtype, device=weight.device)
    _launch(numbers, x_scales, weight, scales, bias, out, weight.shape[1], sizes, device)
    return out


def parts(numbers: Tensor, x_scales: Tensor, weight: Tensor, scales: Tensor, *, sizes: Sizes, device: Device) -> Tensor:
    """See ``reference.parts``. A weight with few rows would occupy few multiprocessors: each part has some columns."""
    (rows, depth), size = numbers.shape, len(weight)
    share = share_of_parts(rows, size, depth, sizes=sizes)
    out = torch.empty(cdiv(depth, share), rows, size, dtype=torch.float32, device=weight.device)
    _launch(numbers, x_scales, weight, scales, None, out, share, sizes, device)
    return out


def _launch(
    numbers: Tensor,
    x_scales: Tensor,
    weight: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out: Tensor,
    share: int,
    sizes: Sizes,
    device: Device,
) -> None:
    (rows, depth), size = numbers.shape, len(weight)
    tile, tile_rows = value_at(sizes.columns, rows), value_at(sizes.rows, rows)
    _fp8_product[(cdiv(size, tile), cdiv(depth, share), cdiv(rows, tile_rows))](
        x=numbers,
        x_scales=x_scales,
        weight=weight,
        scales=scales,
        bias=bias,
        out=out,
        rows=rows,
        size=size,
        K=depth,
        SHARE=share,
        IN_BLOCKS=scales.ndim == 2,
        PARTS=out.ndim == 3,
        LINES=lines_of(min(share, depth, sizes.prefetched)),
        DEPTH=BLOCK,
        TILE=tile,
        ROWS=tile_rows,
        STAGES=value_at(sizes.stages, rows),
        num_warps=value_at(sizes.warps, rows),
        **launch_options(device),
    )


@triton.jit(do_not_specialize=["rows"])
def _fp8_product(
    x,
    x_scales,
    weight,
    scales,
    bias,
    out,
    rows,
    size,
    K: tl.constexpr,
    SHARE: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    PARTS: tl.constexpr,
    LINES: tl.constexpr,
    DEPTH: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    split = tl.program_id(1)
    begin = split * SHARE
    # Past the end, read the last row again: its results are not stored.
    weight_rows = weight + tl.minimum(n, size - 1).to(tl.int64)[:, None] * K
    if PDL:
        prefetch(weight_rows + tl.minimum(begin + tl.arange(0, LINES) * _LINE, K - 1)[None, :])
        wait()
    m = tl.program_id(2) * ROWS + tl.arange(0, ROWS)
    present = m < rows
    acc = _sums(
        x + m.to(tl.int64)[None, :] * K,
        x_scales + m,
        present,
        weight_rows,
        scales + tl.program_id(0) * TILE // DEPTH * tl.cdiv(K, DEPTH),
        begin,
        rows,
        K,
        SHARE,
        IN_BLOCKS,
        DEPTH,
        TILE,
        ROWS,
        STAGES,
    )
    if not IN_BLOCKS:
        own = tl.load(scales + n, mask=n < size, other=0.0)[:, None]
        acc *= tl.load(x_scales + m, mask=present, other=0.0)[None, :] * own
    wanted = (n < size)[:, None] & present[None, :]
    if PARTS:
        place = out + (split * rows + m[None, :]).to(tl.int64) * size + n[:, None]
        tl.store(place, acc, mask=wanted)
    else:
        if bias is not None:
            acc += tl.load(bias + n, mask=n < size, other=0.0).to(tl.float32)[:, None]
        tl.store(out + m[None, :].to(tl.int64) * size + n[:, None], acc.to(out.dtype.element_ty), mask=wanted)


@triton.jit
def _sums(
    x_rows,
    x_scales,
    present,
    weight_rows,
    scales,
    begin,
    rows,
    K: tl.constexpr,
    SHARE: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
    DEPTH: tl.constexpr,
    TILE: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Products ``[TILE, ROWS]`` of ``SHARE`` columns from ``begin`` on, with scales if these are of blocks.

    Args:
        x_rows: pointers ``[1, ROWS]``.
        x_scales: pointers ``[ROWS]`` to those of the first columns; ``scales``, the same of the weight.
        present: ``[ROWS]``.
        weight_rows: pointers ``[TILE, 1]``.
    """
    k = tl.arange(0, DEPTH)
    acc = tl.zeros([TILE, ROWS], tl.float32)
    for start in tl.range(begin, tl.minimum(begin + SHARE, K), DEPTH, num_stages=STAGES):
        if K % DEPTH == 0:
            own = tl.load(weight_rows + start + k[None, :])
            some = tl.load(x_rows + start + k[:, None], mask=present[None, :], other=0.0)
        else:
            inside = start + k < K
            own = tl.load(weight_rows + start + k[None, :], mask=inside[None, :], other=0.0)
            some = tl.load(x_rows + start + k[:, None], mask=present[None, :] & inside[:, None], other=0.0)
        # Not into the accumulator: the instruction would add to it in 14 bits.
        partial = dot(own, some)
        if IN_BLOCKS:
            block = start // DEPTH
            x_scale = tl.load(x_scales + block.to(tl.int64) * rows, mask=present, other=0.0)
            partial *= (x_scale * tl.load(scales + block))[None, :]
        acc += partial
    return acc
