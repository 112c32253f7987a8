"""Numbers and values in sentences for people."""

from typing import Any

# Characters of a value, and values of a list.
_TOLD = 200


def counted(number: int, noun: str) -> str:
    """The number with its noun, which gets an s: ``1 row``, ``2 rows``."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def quoted(value: Any) -> str:
    """A value as Python writes it; of a long one the beginning, because values in messages may be of any size."""
    if isinstance(value, list | tuple | str | bytes):
        value = value[:_TOLD]
    text = repr(value)
    return text if len(text) <= _TOLD else f"{text[:_TOLD]} ..."
