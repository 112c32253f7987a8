"""The products of fp8 rows with fp8 weights on a tile of one expert."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

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
    n,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    UNIT: tl.constexpr,
):
    """Of x and rows ``n`` of an expert's N, and with GATED of those N further on: ``[ROWS, COLUMNS]`` fp32 each.

    Both lie in chunks, see ``Packed``; numbers behind the last column are 0. ``x_scales [ROWS]`` points to those of the
    first columns, the next ones are ``count`` further on.
    """
    chunks: tl.constexpr = (K + _CHUNK - 1) // _CHUNK
    matrix: tl.constexpr = 2 * N if GATED else N
    k = tl.arange(0, _CHUNK)
    # Past the end, read the last row again: its results are not stored.
    row = tl.minimum(n, N - 1)
    weight += (expert.to(tl.int64) * (chunks * matrix) + row[:, None]) * _CHUNK + k[None, :]
    scales += expert.to(tl.int64) * (matrix if UNIT == 0 else chunks * matrix) + row
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    up_acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        place = chunk * matrix
        x = tl.load(x_rows + chunk * _CHUNK + k[None, :], mask=present[:, None], other=0.0)
        # Not into the accumulators: Hopper's instruction would add to them in 14 bits.
        part = tl.dot(x, tl.trans(tl.load(weight + place * _CHUNK)))
        if UNIT == 0:
            acc += part
        else:
            x_scale = tl.load(x_scales + chunk * count, mask=present, other=0.0)[:, None]
            acc += part * (x_scale * tl.load(scales + place)[None, :])
        if GATED:
            part = tl.dot(x, tl.trans(tl.load(weight + (place + N) * _CHUNK)))
            up_acc += part if UNIT == 0 else part * (x_scale * tl.load(scales + place + N)[None, :])
    if UNIT == 0:
        x_scale = tl.load(x_scales, mask=present, other=0.0)[:, None]
        acc *= x_scale * tl.load(scales)[None, :]
        if GATED:
            up_acc *= x_scale * tl.load(scales + N)[None, :]
    return acc, up_acc
