"""What a program reads of packed chunks, see ``rosebatch_kernels.common.chunks``."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl


@triton.jit
def tile_of_program(tiles):
    """Chunk, and first row in it, of the tile whose index is this program's second id."""
    tile = tiles + tl.program_id(1) * 2
    return tl.load(tile), tl.load(tile + 1)


@triton.jit
def chunk_fields(chunks, index):
    """Slot, first row, position of that row and tokens; the first two 64 bits wide, being parts of offsets."""
    chunk = chunks + index * 4
    return tl.load(chunk).to(tl.int64), tl.load(chunk + 1).to(tl.int64), tl.load(chunk + 2), tl.load(chunk + 3)
