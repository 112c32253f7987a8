"""The products of fp8 rows with fp8 weights on a tile of one expert."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from rosebatch_kernels.common.dot import dot
from rosebatch_kernels.experts.packed import CHUNK

_CHUNK = tl.constexpr(CHUNK)


@triton.jit
def fp8_sums(
    x_rows,
    x_scales,
    count,
    present,
    weight,
    scales,
    expert,
    first,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    UNIT: tl.constexpr,
    IN_BLOCKS: tl.constexpr,
):
    """Of x and an expert's rows from ``first`` of N on, and with GATED of those N further on: ``[ROWS, COLUMNS]`` fp32.

    Both lie in chunks, see ``Packed``; numbers behind the last column are 0. ``x_scales [ROWS]`` points to those of the
    first columns, the next ones are ``count`` further on. With IN_BLOCKS, all those rows have the same scale.
    """
    chunks: tl.constexpr = (K + _CHUNK - 1) // _CHUNK
    matrix: tl.constexpr = 2 * N if GATED else N
    k = tl.arange(0, _CHUNK)
    # Past the end, read the last row again: its results are not stored.
    row = tl.minimum(first + tl.arange(0, COLUMNS), N - 1)
    weight += (expert.to(tl.int64) * (chunks * matrix) + row[:, None]) * _CHUNK + k[None, :]
    scales += expert.to(tl.int64) * (matrix if UNIT == 0 else chunks * matrix) + (first if IN_BLOCKS else row)
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    up_acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    # A block's scale is loaded a chunk ahead: Triton's pipeline copies no single numbers.
    factor = tl.load(scales) if IN_BLOCKS else None
    up_factor = tl.load(scales + N) if IN_BLOCKS and GATED else None
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        place = chunk * matrix
        if IN_BLOCKS:
            following = tl.minimum(chunk + 1, chunks - 1) * matrix
            next_factor = tl.load(scales + following)
            if GATED:
                next_up_factor = tl.load(scales + following + N)
        x = tl.load(x_rows + chunk * _CHUNK + k[None, :], mask=present[:, None], other=0.0)
        # Not into the accumulators: Hopper's instruction would add to them in 14 bits.
        part = dot(x, tl.trans(tl.load(weight + place * _CHUNK)))
        if UNIT == 0:
            acc += part
        else:
            x_scale = tl.load(x_scales + chunk * count, mask=present, other=0.0)
            acc += part * _product(x_scale, factor if IN_BLOCKS else tl.load(scales + place), IN_BLOCKS)
        if GATED:
            part = dot(x, tl.trans(tl.load(weight + (place + N) * _CHUNK)))
            if UNIT == 0:
                up_acc += part
            else:
                up_acc += part * _product(x_scale, up_factor if IN_BLOCKS else tl.load(scales + place + N), IN_BLOCKS)
        if IN_BLOCKS:
            factor = next_factor
            if GATED:
                up_factor = next_up_factor
    if UNIT == 0:
        x_scale = tl.load(x_scales, mask=present, other=0.0)
        acc *= _product(x_scale, tl.load(scales), False)
        if GATED:
            up_acc *= _product(x_scale, tl.load(scales + N), False)
    return acc, up_acc


@triton.jit
def _product(x_scale, scale, IN_BLOCKS: tl.constexpr):
    """``[ROWS, COLUMNS]``, or ``[ROWS, 1]`` if all columns have one scale."""
    return (x_scale * scale)[:, None] if IN_BLOCKS else x_scale[:, None] * scale[None, :]
