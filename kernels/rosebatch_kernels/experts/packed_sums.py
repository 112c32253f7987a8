"""The products with quantized weights on a tile of one expert."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from rosebatch_kernels.common.dot import dot
from rosebatch_kernels.experts.codes import numbers, scale_of_e2m1
from rosebatch_kernels.experts.packed import MIDDLE

_MIDDLE = tl.constexpr(float(MIDDLE))


@triton.jit
def packed_sums(
    x_rows,
    present,
    words,
    scales,
    zeros,
    expert,
    n,
    N: tl.constexpr,
    K: tl.constexpr,
    GATED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    CODE: tl.constexpr,
    UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """x times rows ``n`` of an expert's N, and with GATED those N further on: ``[ROWS, COLUMNS]`` fp32 each.

    Scales of e2m1 are powers of two: a number times its scale is exact. All others multiply the sum over their columns.
    """
    piece: tl.constexpr = CODE.PIECE
    pieces: tl.constexpr = 16 // CODE.BITS
    depth: tl.constexpr = piece * pieces
    chunks: tl.constexpr = (K + depth - 1) // depth
    matrix: tl.constexpr = 2 * N if GATED else N
    # Units of a chunk, those of e2m1 in one word; a unit of all columns multiplies the whole sum.
    units: tl.constexpr = 1 if CODE.FORM == "e2m1" or UNIT == 0 else depth // UNIT
    in_parts: tl.constexpr = CODE.FORM != "e2m1" and UNIT > 0
    q = tl.arange(0, piece)
    # Past the end, read the last row again: its results are not stored.
    row = tl.minimum(n, N - 1)
    words += (expert.to(tl.int64) * (chunks * matrix) + row[:, None]) * piece + q[None, :]
    first = expert.to(tl.int64) * (matrix if UNIT == 0 else units * chunks * matrix) + row
    scales += first
    if zeros is not None:
        zeros += first
    acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    up_acc = tl.zeros([COLUMNS, ROWS], tl.float32)
    for chunk in tl.range(0, chunks, num_stages=STAGES):
        place = chunk * matrix
        unit = 0 if UNIT == 0 else place * units
        dtype = x_rows.dtype.element_ty
        gate = _values(words + place * piece, scales, zeros, unit, matrix, dtype, CODE, UNIT)
        if GATED:
            up = _values(words + (place + N) * piece, scales, zeros, unit + N, matrix, dtype, CODE, UNIT)
        part = tl.zeros([COLUMNS, ROWS], tl.float32) if in_parts else acc
        up_part = tl.zeros([COLUMNS, ROWS], tl.float32) if in_parts else up_acc
        for i in tl.static_range(pieces):
            column = chunk * depth + i * piece + q[None, :]
            if K % depth == 0:
                x = tl.trans(tl.load(x_rows + column, mask=present[:, None], other=0.0))
            else:
                x = tl.trans(tl.load(x_rows + column, mask=present[:, None] & (column < K), other=0.0))
            part = dot(gate[i], x, part, PRECISION=PRECISION)
            if GATED:
                # Behind the same fence.
                up_part = tl.dot(up[i], x, up_part, input_precision=PRECISION)
            if in_parts and piece == UNIT:
                acc += part * tl.load(scales + unit + i * matrix)[:, None]
                part = tl.zeros([COLUMNS, ROWS], tl.float32)
                if GATED:
                    up_acc += up_part * tl.load(scales + unit + i * matrix + N)[:, None]
                    up_part = tl.zeros([COLUMNS, ROWS], tl.float32)
        if not in_parts:
            acc, up_acc = part, up_part
        elif piece != UNIT:
            acc += part * tl.load(scales + unit)[:, None]
            if GATED:
                up_acc += up_part * tl.load(scales + unit + N)[:, None]
    if UNIT == 0:
        acc *= tl.load(scales)[:, None]
        if GATED:
            up_acc *= tl.load(scales + N)[:, None]
    return tl.trans(acc), tl.trans(up_acc)


@triton.jit
def _values(
    words, scales, zeros, unit, MATRIX: tl.constexpr, DTYPE: tl.constexpr, CODE: tl.constexpr, UNIT: tl.constexpr
):
    """A tuple of the pieces of a chunk: values of e2m1, of all others without their scale."""
    codes = numbers(tl.load(words), DTYPE, CODE)
    if CODE.FORM == "e2m1":
        four = tl.load(scales + unit)
        return (
            codes[0] * scale_of_e2m1(four & 255, DTYPE)[:, None],
            codes[1] * scale_of_e2m1((four >> 8) & 255, DTYPE)[:, None],
            codes[2] * scale_of_e2m1((four >> 16) & 255, DTYPE)[:, None],
            codes[3] * scale_of_e2m1((four >> 24) & 255, DTYPE)[:, None],
        )
    elif CODE.FORM == "e4m3":  # noqa: RET505 (a compile-time condition)
        factor = tl.full([1, 1], CODE.FACTOR, DTYPE)
        return codes[0] * factor, codes[1] * factor
    else:
        step: tl.constexpr = MATRIX if UNIT == CODE.PIECE else 0
        return (
            codes[0] - _offset(zeros, unit, DTYPE, CODE),
            codes[1] - _offset(zeros, unit + step, DTYPE, CODE),
            codes[2] - _offset(zeros, unit + 2 * step, DTYPE, CODE),
            codes[3] - _offset(zeros, unit + 3 * step, DTYPE, CODE),
        )


@triton.jit
def _offset(zeros, unit, DTYPE: tl.constexpr, CODE: tl.constexpr):
    """What is subtracted of an integer."""
    if zeros is None:
        return tl.full([1, 1], CODE.FACTOR + _MIDDLE, DTYPE)
    else:  # noqa: RET505 (a compile-time condition)
        return (tl.load(zeros + unit) + CODE.FACTOR).to(DTYPE)[:, None]
