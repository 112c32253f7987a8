"""Rows of 16-bit values to e4m3 numbers and scales, for every kernel that leaves them; see ``reference.quantize``."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

from rosebatch_kernels.common.e4m3 import LARGEST
from rosebatch_kernels.fp8 import reference

_LARGEST = tl.constexpr(LARGEST)
_MIN_SCALE = tl.constexpr(reference.MIN_SCALE)
_MIN_BLOCK_SCALE = tl.constexpr(reference.MIN_BLOCK_SCALE)


@triton.jit
def _quotient(value, scale):
    """``value / scale``, correctly rounded, in a fifth of a division's instructions.

    The rest of a first guess corrects it: what is left is exact where a product is added without rounding it (source:
    P. Markstein, IBM J. Res. Dev. 34, 1990). A guess without a rest is kept, for the sign of zero.
    """
    inverse = tl.broadcast_to(tl.div_rn(1.0, scale), value.shape)
    guess = value * inverse
    rest = tl.fma(-guess, tl.broadcast_to(scale, value.shape), value)
    return tl.where(rest == 0.0, guess, tl.fma(rest, inverse, guess))


@triton.jit
def store_quantized(
    value,
    numbers,
    scales,
    row,
    column,
    rows,
    first,
    SIZE: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr = 0,
):
    """Write the numbers ``[rows, SIZE]`` and scales ``[G, rows]`` of a tile.

    Args:
        value: ``[ROWS, COLUMNS]`` fp32, rounded to 16 bits before; 0 where there is no column.
        numbers, scales: see ``reference.quantize``.
        row: ``[ROWS, 1]`` int64.
        column: ``[ROWS, COLUMNS]``.
        rows: of x.
        first: column of the tile.
        SIZE: columns of x.
        GROUP: columns that share a scale; 0: all, which are in the tile.
        ROWS, COLUMNS: of the tile; COLUMNS is a multiple of GROUP and CHUNK.
        CHUNK: columns whose halves are stored in turns, the last ones filled up with 0; 0: all as they are.
    """
    if GROUP == 0:
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(value), 1, keep_dims=True), _LARGEST), _MIN_SCALE)
        tl.store(scales + row, scale, row < rows)
        scaled = _quotient(value, scale)
    else:
        grouped = tl.reshape(value, (ROWS, COLUMNS // GROUP, GROUP))
        scale = tl.maximum(tl.div_rn(tl.max(tl.abs(grouped), 2, keep_dims=True), _LARGEST), _MIN_BLOCK_SCALE)
        group = first // GROUP + tl.arange(0, COLUMNS // GROUP)[None, :]
        exists = (row < rows) & (group * GROUP < SIZE)
        tl.store(scales + group.to(tl.int64) * rows + row, tl.reshape(scale, (ROWS, COLUMNS // GROUP)), exists)
        scaled = tl.reshape(_quotient(grouped, scale), (ROWS, COLUMNS))
    # No number exceeds 448 by more than rounding, so none is infinite; NaN stays NaN, and shows in the product.
    if CHUNK == 0:
        tl.store(numbers + row * SIZE + column, scaled.to(tl.float8e4nv), (row < rows) & (column < SIZE))
    else:
        width: tl.constexpr = (SIZE + CHUNK - 1) // CHUNK * CHUNK
        halves = tl.reshape(scaled.to(tl.float8e4nv), (ROWS, COLUMNS // CHUNK, 2, CHUNK // 2))
        codes = tl.reshape(tl.permute(halves, (0, 1, 3, 2)), (ROWS, COLUMNS))
        tl.store(numbers + row * width + column, codes, (row < rows) & (column < width))
