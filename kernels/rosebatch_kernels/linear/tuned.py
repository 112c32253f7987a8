"""Sizes of the matrix product's programs, and the products that are faster than cuBLAS's."""

from dataclasses import dataclass

from rosebatch_kernels.common.tuned import Steps


@dataclass(frozen=True)
class Tuned:
    """Measured on an H100 80GB HBM3.

    Attributes:
        rows: rows of x in a tile of ``linear``. Hopper's matrix instruction takes no fewer; missing rows cost no loads.
        columns: rows of the weight in a tile of ``linear``.
        depth: products at a time in ``linear`` without a gate.
        gated_depth: products at a time in ``linear`` with a gate, by rows of x.
        part_rows: rows of x in a tile of ``parts``, by rows of x.
        part_columns: rows of the weight in a tile of ``parts``, by rows of the weight.
        part_depth: products at a time in ``parts``.
        programs: ``parts`` divides the weight until it has this many, enough for 132 multiprocessors.
        most_parts: parts at most, by rows of x. A second tile of rows doubles the programs too.
        least_share: columns of the weight in a part at least.
        warps, stages: of a program.
        most_rows: rows of x up to which ``linear`` beats cuBLAS.
        most_rows_in_parts: rows of x up to which ``parts`` beats cuBLAS.
        most_elements: elements of the weight up to which they do. Above, reading the weight takes so long that nothing
            else counts.
    """

    rows: int = 64
    columns: int = 32
    depth: int = 128
    gated_depth: Steps = ((33, 64), (0, 128))
    part_rows: Steps = ((17, 64), (0, 16))
    part_columns: Steps = ((1024, 64), (0, 32))
    part_depth: int = 64
    programs: int = 96
    most_parts: Steps = ((65, 4), (0, 8))
    least_share: int = 128
    warps: int = 4
    stages: int = 5
    most_rows: int = 64
    most_rows_in_parts: int = 128
    most_elements: int = 2**23


TUNED = Tuned()
