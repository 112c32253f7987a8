"""Sizes of the matrix product's programs, and the products that are faster than cuBLAS's."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from rosebatch_kernels.common.sizes import Steps, table, value_at


class Program(NamedTuple):
    """Sizes of a program.

    Attributes:
        rows: rows of x in a tile. Hopper's matrix instruction takes no fewer than 64; missing rows cost no loads.
        columns: rows of the weight in a tile; with a gate, as many again.
        depth: products at a time.
        warps, stages: of a program.
        registers: of a thread at most. With a limit, even the highest there is, the compiler takes the registers that
            it has use for; with None, as few as it can.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    registers: int | None


# By rows of x.
Programs = tuple[tuple[int, Program], ...]
# Of 33 rows and more, with Hopper's instruction.
_TWO_TILES = Program(64, 32, 128, 4, 5, 255)
_FEW = Program(16, 32, 128, 4, 8, 255)
_FEW_ONTO = _FEW._replace(columns=16)


@dataclass(frozen=True)
class Sizes:
    """Sizes of programs; the measured ones are of an H100 80GB HBM3, registers and whole products of an H200.

    Attributes:
        whole: of ``linear`` without a gate.
        gated: of ``linear`` with a gate.
        onto: of ``add_``, which serves weights that are otherwise multiplied in parts.
        part_rows: rows of x in a tile of ``parts``, by rows of x.
        part_columns: rows of the weight in a tile of ``parts``, by rows of the weight.
        part_depth: products at a time in ``parts``; half as many where parts would come out uneven.
        programs: ``parts`` divides the weight until it has this many, enough for 132 multiprocessors.
        max_parts: parts at most, by rows of x. A second tile of rows doubles the programs too.
        min_share: columns of the weight in a part at least.
        part_warps: of a program of ``parts``.
        part_registers, part_stages: of such a program, by rows of x.
        max_rows: rows of x up to which ``linear`` beats cuBLAS.
        max_rows_in_parts: rows of x up to which ``parts`` beats cuBLAS.
        max_elements: elements of the weight up to which they do. Above, reading the weight takes so long that nothing
            else counts.
        max_rows_onto: rows of x up to which ``add_`` beats cuBLAS, by columns of the weight.
        min_rows_onto: rows of x from which cuBLAS had better add the product to the residual than the norm's kernel.
    """

    whole: Programs = ((33, _TWO_TILES), (17, _FEW._replace(rows=32)), (0, _FEW))
    gated: Programs = ((33, _TWO_TILES._replace(depth=64, stages=8)), (0, _TWO_TILES._replace(registers=None)))
    onto: Programs = ((17, _FEW_ONTO._replace(rows=32, depth=64)), (0, _FEW_ONTO))
    part_rows: Steps = ((17, 64), (0, 16))
    part_columns: Steps = ((1024, 64), (0, 32))
    part_depth: int = 128
    programs: int = 96
    max_parts: Steps = ((65, 4), (0, 8))
    min_share: int = 128
    part_warps: int = 4
    part_registers: tuple[tuple[int, int | None], ...] = ((33, 255), (0, None))
    part_stages: Steps = ((65, 4), (0, 5))
    max_rows: int = 64
    max_rows_in_parts: int = 128
    max_elements: int = 2**23
    max_rows_onto: Steps = ((2049, 16), (0, 32))
    min_rows_onto: int = 513

    def invariant(self) -> "Sizes":
        """No parts, whose number goes by the rows; and one way to add to the residual for all numbers of rows."""
        return replace(self, max_rows_in_parts=0, min_rows_onto=0)


def fixed(program: Program) -> Sizes:
    """One program for all products."""
    programs = ((0, program),)
    return Sizes(whole=programs, gated=programs, onto=programs)


SIZES = table(Sizes())
# Of products for any number of rows, which were not measured.
FIXED = table(fixed(Program(64, 64, 64, 4, 3, None)))
FIXED_FP32 = table(fixed(Program(32, 64, 32, 4, 2, None)))


def program_of_parts(rows: int, size_out: int, size_in: int, *, sizes: Sizes) -> tuple[int, Program]:
    """The number of parts of a product of so many rows, and the sizes of its programs."""
    tile, limit = value_at(sizes.part_columns, size_out), value_at(sizes.max_parts, rows)
    tiles, splits = -(-size_out // tile), 1
    while splits < limit and tiles * splits < sizes.programs and size_in // (splits * 2) >= sizes.min_share:
        splits *= 2
    # Half as many at a time where the last part would be left with too little.
    depth = sizes.part_depth // (1 if size_in % (splits * sizes.part_depth) == 0 else 2)
    registers = value_at(sizes.part_registers, rows)
    stages = value_at(sizes.part_stages, rows)
    return splits, Program(value_at(sizes.part_rows, rows), tile, depth, sizes.part_warps, stages, registers)
