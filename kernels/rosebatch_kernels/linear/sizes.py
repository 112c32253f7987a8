"""Sizes of the matrix product's programs, and the products that are faster than cuBLAS's."""

from dataclasses import dataclass, replace

from rosebatch_kernels.common.sizes import Steps, table, value_at


@dataclass(frozen=True)
class Sizes:
    """Sizes of programs; the measured ones are of an H100 80GB HBM3.

    Attributes:
        rows: rows of x in a tile of ``linear``. Hopper's matrix instruction takes no fewer; missing rows cost no loads.
        columns: rows of the weight in a tile of ``linear``.
        depth: products at a time in ``linear`` without a gate.
        gated_depth: products at a time in ``linear`` with a gate, by rows of x.
        part_rows: rows of x in a tile of ``parts``, by rows of x.
        part_columns: rows of the weight in a tile of ``parts``, by rows of the weight.
        part_depth: products at a time in ``parts``; half as many where parts would come out uneven.
        programs: ``parts`` divides the weight until it has this many, enough for 132 multiprocessors.
        max_parts: parts at most, by rows of x. A second tile of rows doubles the programs too.
        min_share: columns of the weight in a part at least.
        warps, stages: of a program.
        registers: of a thread at most, by rows of x, measured on an H200. With a limit, even the highest there is, the
            compiler takes the registers that it has use for; with None, as few as it can.
        part_stages: of a program of ``parts``, by rows of x.
        max_rows: rows of x up to which ``linear`` beats cuBLAS.
        max_rows_in_parts: rows of x up to which ``parts`` beats cuBLAS.
        max_elements: elements of the weight up to which they do. Above, reading the weight takes so long that nothing
            else counts.
        min_rows_onto: rows of x from which cuBLAS had better add the product to the residual than the norm's kernel.
    """

    rows: int = 64
    columns: int = 32
    depth: int = 128
    gated_depth: Steps = ((33, 64), (0, 128))
    part_rows: Steps = ((17, 64), (0, 16))
    part_columns: Steps = ((1024, 64), (0, 32))
    part_depth: int = 128
    programs: int = 96
    max_parts: Steps = ((65, 4), (0, 8))
    min_share: int = 128
    warps: int = 4
    stages: int = 5
    registers: tuple[tuple[int, int | None], ...] = ((33, 255), (0, None))
    part_stages: Steps = ((65, 4), (0, 5))
    max_rows: int = 64
    max_rows_in_parts: int = 128
    max_elements: int = 2**23
    min_rows_onto: int = 513

    def invariant(self) -> "Sizes":
        """No parts, whose number goes by the rows; and one way to add to the residual for all numbers of rows."""
        return replace(self, max_rows_in_parts=0, min_rows_onto=0)


SIZES = table(Sizes())
# Of products for any number of rows, which were not measured.
FIXED = table(Sizes(columns=64, depth=64, gated_depth=((0, 64),), stages=3, registers=((0, None),)))
FIXED_FP32 = table(Sizes(rows=32, columns=64, depth=32, gated_depth=((0, 32),), stages=2, registers=((0, None),)))


def tile_of_parts(rows: int, size_out: int, size_in: int, *, sizes: Sizes) -> tuple[int, dict[str, int]]:
    """The number of parts of a product of so many rows, and ``ROWS``, ``TILE`` and ``DEPTH`` of its programs."""
    tile, limit = value_at(sizes.part_columns, size_out), value_at(sizes.max_parts, rows)
    tiles, splits = -(-size_out // tile), 1
    while splits < limit and tiles * splits < sizes.programs and size_in // (splits * 2) >= sizes.min_share:
        splits *= 2
    # Half as many at a time where the last part would be left with too little.
    depth = sizes.part_depth // (1 if size_in % (splits * sizes.part_depth) == 0 else 2)
    return splits, {"ROWS": value_at(sizes.part_rows, rows), "TILE": tile, "DEPTH": depth}
