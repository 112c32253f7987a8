"""Sizes of the matrix product's programs, and the products that it serves."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuned:
    """Measured on an H100 80GB HBM3, thresholds against cuBLAS.

    ``parts`` needs enough programs for 132 multiprocessors.

    Attributes:
        rows: rows of x in a tile. Hopper's matrix instruction takes no fewer, and missing rows cost no loads.
        warps, stages: of a program.
        columns: rows of the weight in a tile of ``linear``.
        depth: products at a time in ``linear``.
        depth_of_gate: the same for a gated product of more than ``few_gated_rows`` rows.
        few_gated_rows: see above.
        part_columns: rows of the weight in a tile of ``parts``.
        part_columns_of_small: the same for a weight of fewer than ``large`` rows.
        large: see above.
        part_depth: products at a time in ``parts``.
        part_rows: rows of x in a tile of ``parts`` where that many are enough; else ``rows``.
        most_parts: parts for at most ``rows`` rows of x.
        most_parts_of_many: parts for more: the second tile of rows doubles the programs too.
        programs: ``parts`` divides the weight until it has this many.
        least_share: fewest columns of the weight in a part.
        most_rows: rows of x up to which ``linear`` beats cuBLAS.
        most_rows_in_parts: rows of x up to which ``parts`` beats cuBLAS.
        most_elements: elements of the weight up to which they do; reading a larger weight takes so long that nothing
            else counts.
    """

    rows: int = 64
    warps: int = 4
    stages: int = 5
    columns: int = 32
    depth: int = 128
    depth_of_gate: int = 64
    few_gated_rows: int = 32
    part_columns: int = 64
    part_columns_of_small: int = 32
    large: int = 1024
    part_depth: int = 64
    part_rows: int = 16
    most_parts: int = 8
    most_parts_of_many: int = 4
    programs: int = 96
    least_share: int = 128
    most_rows: int = 64
    most_rows_in_parts: int = 128
    most_elements: int = 2**23


TUNED = Tuned()
