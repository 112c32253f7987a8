"""Sizes of the programs of the product with 4-bit integers."""

import sys
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from rosebatch_kernels.common.sizes import table, value_at
from rosebatch_kernels.int4.layout import CHUNK, Int4Weight


class Program(NamedTuple):
    """Sizes of a product's programs.

    Attributes:
        rows: rows of x in a tile.
        tile: rows of the weight in a tile.
        warps, stages: of a program.
        programs: ``parts`` divides the weight until it has this many.
        max_parts: parts at most.
        rounds: whether a value is rounded before it is multiplied, in place of a sum that is multiplied by its scale.
            One accumulator leaves room for larger tiles. Scales must have the type of x.
    """

    rows: int
    tile: int
    warps: int
    stages: int
    programs: int = 256
    max_parts: int = 8
    rounds: bool = False


# More parts than any product has.
_NEVER = 1 << 10
# By rows of x, largest least first.
Programs = tuple[tuple[int, Program], ...]


@dataclass(frozen=True)
class Sizes:
    """Sizes of programs, measured on an H100 80GB HBM3; those of up to 16 rows on an H200, exact ones of more than 64
    rows not yet.

    Attributes:
        exact: programs that multiply a sum by its scale.
        rounding: programs that round values, if scales have the type of x and there is one for so many rows.
        min_share: chunks of the weight in a part at least.
        prefetched: chunks that a program requests before its predecessor ends.
        max_rows: rows of x up to which the codes are multiplied; more are multiplied with values, decoded in between.
        max_rows_in_parts: the same for ``parts``.
        min_summed: parts from which a whole product is faster with a kernel that adds them up, by rows of x.
        min_rows_onto: rows of x from which cuBLAS had better add the product to the residual than the norm's kernel.
        scratch: bytes of the values that are decoded at a time. They should stay in the L2 cache.
        decoded: rows of the weight in a tile of ``decode``.
    """

    exact: Programs = (
        (65, Program(128, 128, 8, 3, max_parts=4)),
        (33, Program(64, 128, 8, 3)),
        (17, Program(32, 128, 4, 3)),
        (9, Program(16, 64, 2, 3, programs=512)),
        (0, Program(8, 64, 2, 3, programs=512)),
    )
    rounding: Programs = ((65, Program(128, 128, 8, 3, programs=160, rounds=True)),)
    min_share: int = 4
    prefetched: int = 4
    max_rows: int = 512
    max_rows_in_parts: int = 512
    min_summed: tuple[tuple[int, int], ...] = ((257, _NEVER), (129, 2), (17, 4), (0, 2))
    min_rows_onto: int = 513
    scratch: int = 2**25
    decoded: int = 32

    def invariant(self) -> "Sizes":
        """Whole sums of codes for all numbers of rows: no parts, no rounded values."""
        exact = tuple((rows, program._replace(max_parts=1)) for rows, program in self.exact)
        whole = replace(self, exact=exact, rounding=(), max_rows_in_parts=0)
        return replace(whole, max_rows=sys.maxsize, min_rows_onto=sys.maxsize)


_SMALL = (
    (65, Program(64, 128, 8, 3, max_parts=4)),
    (33, Program(64, 128, 8, 3)),
    (17, Program(32, 128, 4, 4)),
    (0, Program(16, 128, 4, 4)),
)
# Smaller tiles where a program has less shared memory, or the L2 cache is smaller.
SIZES = table(Sizes(), sm_86=replace(Sizes(), exact=_SMALL, rounding=(), scratch=2**22))


def program_of(rows: int, weight: Int4Weight, dtype: torch.dtype, *, sizes: Sizes) -> Program:
    """Of a product of so many rows of ``dtype``."""
    rounding = sizes.rounding if weight.scales.dtype == dtype else ()
    return value_at(rounding + sizes.exact, rows)


def splits_of(rows: int, weight: Int4Weight, dtype: torch.dtype, *, sizes: Sizes) -> int:
    """The number of parts of a product of so many rows of ``dtype``."""
    program = program_of(rows, weight, dtype, sizes=sizes)
    size, columns = weight.shape
    tiles = -(-size // program.tile) * -(-rows // program.rows)
    most, splits = min(program.max_parts, -(-columns // CHUNK) // sizes.min_share), 1
    while splits * 2 <= most and tiles * splits < program.programs:
        splits *= 2
    return splits
