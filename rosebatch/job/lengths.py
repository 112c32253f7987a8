"""How long the answers of rows may become: towards the end of a job, long ones should begin first."""

import math

from rosebatch.io.rows import FailedRow, Row

# Rows that are read ahead for each that runs: the more are left at the end, the better their order can be.
ROWS_AHEAD = 16
# Answers whose lengths differ by less than this share of an octave are alike.
_CLASSES_AN_OCTAVE = 2


def class_of(tokens: int) -> int:
    """Grows with the tokens of an answer."""
    return int(_CLASSES_AN_OCTAVE * math.log2(tokens))


def length_class(row: Row | FailedRow) -> int:
    """The class of the longest answer that the row may have; 0 for rows without one."""
    return class_of(row.sampling.max_tokens) if isinstance(row, Row) and row.generates else 0
