"""Sizes of fp8 products' programs, and the rows for which the library's products are faster."""

import sys
from dataclasses import dataclass, replace

from rosebatch_kernels.common.sizes import Steps, table, value_at
from rosebatch_kernels.fp8.reference import BLOCK


@dataclass(frozen=True)
class Sizes:
    """Sizes of programs; the rows up to which they are used were measured on an H100 80GB HBM3.

    Attributes:
        rows: rows of x in a tile, by rows of x.
        columns: rows of the weight in a tile, by rows of x; a divisor of 128, because a tile has one scale of blocks.
        programs: a product in parts is divided until it has this many.
        max_parts: parts at most.
        min_share: columns of the weight in a part at least.
        warps, stages: of a program, by rows of x.
        prefetched: columns that a program requests before its predecessor ends. All columns of a large weight would
            not stay in the L2 cache until they are read.
        max_rows: rows of x up to which the kernel beats PyTorch's.
        max_rows_in_parts: rows of x up to which it does in parts.
    """

    rows: Steps = ((65, 128), (33, 64), (17, 32), (0, 16))
    columns: Steps = ((65, 128), (0, 64))
    programs: int = 192
    max_parts: int = 8
    min_share: int = 512
    warps: Steps = ((65, 8), (0, 4))
    stages: Steps = ((65, 3), (0, 4))
    prefetched: int = 1024
    max_rows: int = 32
    max_rows_in_parts: int = 64

    def invariant(self) -> "Sizes":
        """Whole sums of the kernel for all numbers of rows."""
        return replace(self, max_rows=sys.maxsize, max_rows_in_parts=0)


SIZES = table(Sizes())


def share_of_parts(rows: int, size_out: int, size_in: int, *, sizes: Sizes) -> int:
    """Columns of the weight in each part of a product of so many rows."""
    tiles, splits = -(-size_out // value_at(sizes.columns, rows)), 1
    while splits < sizes.max_parts and tiles * splits < sizes.programs and size_in // (splits * 2) >= sizes.min_share:
        splits *= 2
    return -(-size_in // splits // BLOCK) * BLOCK
