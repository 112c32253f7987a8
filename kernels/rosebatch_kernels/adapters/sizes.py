"""Sizes of the programs that multiply with A and B. None was measured yet."""

from dataclasses import dataclass, replace

from rosebatch_kernels.common.sizes import Steps, table


@dataclass(frozen=True)
class Sizes:
    """Sizes of programs; those by rows go by the rows of a step.

    Attributes:
        rows: of a tile. Few rows of a step have many adapters, and many rows of a prompt have one.
        shares: columns of A that a program multiplies, by rows. The reader adds up the parts.
        ranks: of a tile of A.
        depth, wide_depth: products at a time, in 16 bits and in fp32.
        shrink_warps, shrink_stages: of a program that multiplies with A.
        warps: of a program that multiplies with B, by rows of a tile.
        stages: of such a program. With more than one, what it loads of a table passes through shared memory, and the
            compiler no longer knows that outputs begin at 16 bytes.
        registers: of its threads at most, by rows of a tile; None leaves it to the compiler. With a few more than 128,
            a multiprocessor would hold one program in place of two.
        programs: that multiply with B, for each multiprocessor.
        chunk: rows that a program of the sort places.
    """

    rows: Steps = ((1025, 64), (0, 16))
    shares: Steps = ((1025, 4096), (0, 1024))
    ranks: int = 64
    depth: int = 128
    wide_depth: int = 32
    shrink_warps: int = 4
    shrink_stages: int = 3
    warps: Steps = ((64, 8), (0, 4))
    stages: int = 1
    registers: tuple[tuple[int, int | None], ...] = ((64, 128), (0, None))
    programs: int = 8
    chunk: int = 128

    def invariant(self) -> "Sizes":
        """One tile and one share for all numbers of rows."""
        return replace(self, rows=((0, 64),), shares=((0, 2048),))


SIZES = table(Sizes())
