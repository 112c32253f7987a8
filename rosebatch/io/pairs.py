"""Pairs of texts: a model that compares two texts has both as one prompt."""

from collections.abc import Sequence
from typing import Any

from rosebatch.core.errors import RowError

# The fields of a row that has them.
PAIR = ("text_1", "text_2")
# Pairs of a row. More would hold a long text as many times.
_MOST = 1024


def is_pair(line: Any, others: Sequence[str]) -> bool:
    """Whether a checked line has a pair.

    Args:
        line: may have the fields of pairs.
        others: fields that it may have without them.

    Raises:
        RowError: it has one text alone, or other fields as well.
    """
    given = [name for name in PAIR if getattr(line, name) is not None]
    if not given:
        return False
    beside = [name for name in others if getattr(line, name) is not None]
    if given != list(PAIR) or beside:
        raise RowError("missing_prompt", f"expected text_1 and text_2 alone; got {' and '.join(given + beside)}")
    return True


def pairs_of(
    first: str | Sequence[str],
    second: str | Sequence[str],
    most: float = _MOST,
    names: Sequence[str] = PAIR,
) -> tuple[tuple[str, str], ...]:
    """The pairs of two texts, of a text with each of several, or of as many as the others; ``most`` in a row.

    ``names`` are those of the fields that have them, for messages.

    Raises:
        RowError: there are none, too many, or not as many of both.
    """
    ones = [first] if isinstance(first, str) else list(first)
    twos = [second] if isinstance(second, str) else list(second)
    ones = ones * len(twos) if len(ones) == 1 else ones
    if len(ones) != len(twos):
        raise RowError("invalid_field", f"{names[0]} has {len(ones)} texts, and {names[1]} {len(twos)}")
    if not 1 <= len(twos) <= most:
        raise RowError("invalid_field", f"{names[1]} must have 1 to {_MOST} texts, got {len(twos)}")
    return tuple(zip(ones, twos, strict=True))
