"""Tiles of prefill attention: successive query tokens of one sequence, the work of one program.

The caller describes a call by ``tiles [N, 4]`` int32: row of the block table, first row in q, position of that row,
and number of rows. The number is at most ``TILE_ROWS``; a tile of 0 rows is padding.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.chunks import TILE_ROWS as TILE_ROWS
from rosebatch_kernels.common.heads import shape_of


def prefill_arguments(
    q: Tensor, cache: Tensor, block_table: Tensor, tiles: Tensor, *, num_heads: int
) -> tuple[Tensor, dict[str, Any]]:
    """The result, and arguments of a kernel that computes it: the attention of tiles."""
    out = q.new_empty(len(q), num_heads * cache.shape[-1])
    return out, {
        "out": out,
        "q": q,
        "cache": cache,
        "block_table": block_table,
        "tiles": tiles,
        "num_blocks": cache.shape[1],
        "q_stride": q.stride(0),
        "table_stride": block_table.stride(0),
        "SHAPE": shape_of(cache, num_heads),
        "ROWS": TILE_ROWS,
    }


@triton.jit
def tile_of_program(tiles):
    """The four numbers of the tile whose index is this program's second id."""
    tile = tiles + tl.program_id(1) * 4
    return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)


@triton.jit
def rows_of_tile(first_row, count, ROWS: tl.constexpr, SHAPE: tl.constexpr):
    """A tile's rows ``[ROWS, 1]`` of the packed tokens, int64, and the mask ``[ROWS, WIDTH]`` of what is in them."""
    r = tl.arange(0, ROWS)
    d = tl.arange(0, SHAPE.WIDTH)[None, :]
    return (first_row + r).to(tl.int64)[:, None], (r < count)[:, None] & (d < SHAPE.D)


@triton.jit
def load_queries(q, q_stride, head, rows, mine, SHAPE: tl.constexpr):
    """q ``[ROWS, WIDTH]`` of a query head."""
    d = tl.arange(0, SHAPE.WIDTH)[None, :]
    return tl.load(q + rows * q_stride + head * SHAPE.D + d, mask=mine, other=0.0)


@triton.jit
def store_result(out, head, rows, mine, result, SHAPE: tl.constexpr):
    """Write ``result [ROWS, WIDTH]`` of a query head."""
    d = tl.arange(0, SHAPE.WIDTH)[None, :]
    place = out + rows * (SHAPE.HEADS * SHAPE.D) + head * SHAPE.D + d
    tl.store(place, result.to(out.dtype.element_ty), mask=mine)
