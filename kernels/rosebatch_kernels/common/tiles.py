"""Tiles of prefill attention: successive query tokens of one sequence, the work of one program.

The caller describes a call by ``tiles [N, 4]`` int32: row of the block table, first row in q, position of that row,
and number of rows. The number is at most ``TILE_ROWS``; a tile of 0 rows is padding.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl

# Query tokens of a tile: the caller cuts its chunks into tiles of this many.
TILE_ROWS = 64


@triton.jit
def tile_of_program(tiles):
    """The four numbers of the tile whose index is this program's second id."""
    tile = tiles + tl.program_id(1) * 4
    return tl.load(tile), tl.load(tile + 1), tl.load(tile + 2), tl.load(tile + 3)
