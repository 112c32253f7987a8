"""Sizes of the programs of the product with 4-bit integers."""

from dataclasses import dataclass, replace

from rosebatch_kernels.common.sizes import Steps, table, value_at
from rosebatch_kernels.int4.layout import CHUNK, Int4Weight


@dataclass(frozen=True)
class Sizes:
    """Sizes of programs, measured on an H100 80GB HBM3 for 1, 16 and 64 rows of x; others are not yet.

    Attributes:
        rows: rows of x in a tile, by rows of x.
        tile: rows of the weight in a tile, by rows of x.
        warps, stages: of a program, by rows of x.
        programs: ``parts`` divides the weight until it has this many.
        max_parts: parts at most, by rows of x.
        min_share: chunks of the weight in a part at least.
        prefetched: chunks that a program requests before its predecessor ends.
        max_rows: rows of x up to which the codes are multiplied; more are multiplied with values, decoded in between.
        max_rows_in_parts: the same for ``parts``.
        min_summed, max_rows_summed: parts at least, and rows of x at most, for which a whole product is faster in parts
            with a kernel that adds them up.
        min_rows_onto: rows of x from which cuBLAS had better add the product to the residual than the norm's kernel.
        scratch: bytes of the values that are decoded at a time. They should stay in the L2 cache.
        decoded: rows of the weight in a tile of ``decode``.
    """

    rows: Steps = ((65, 128), (33, 64), (17, 32), (0, 16))
    tile: Steps = ((0, 128),)
    warps: Steps = ((33, 8), (0, 4))
    stages: Steps = ((17, 3), (0, 5))
    programs: int = 256
    max_parts: Steps = ((65, 4), (0, 8))
    min_share: int = 4
    prefetched: int = 4
    max_rows: int = 256
    max_rows_in_parts: int = 128
    min_summed: int = 4
    max_rows_summed: int = 64
    min_rows_onto: int = 513
    scratch: int = 2**25
    decoded: int = 32


# Smaller tiles where a program has less shared memory, or the L2 cache is smaller.
SIZES = table(
    Sizes(),
    sm_86=replace(Sizes(), rows=((33, 64), (17, 32), (0, 16)), stages=((33, 3), (0, 4)), scratch=2**22),
)


def splits_of(rows: int, weight: Int4Weight, *, sizes: Sizes) -> int:
    """The number of parts of a product of so many rows."""
    size, columns = weight.shape
    tiles, limit = -(-size // value_at(sizes.tile, rows)), value_at(sizes.max_parts, rows)
    chunks, splits = -(-columns // CHUNK), 1
    while splits < limit and tiles * splits < sizes.programs and chunks // (splits * 2) >= sizes.min_share:
        splits *= 2
    return splits
