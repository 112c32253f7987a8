"""Lines of JSON whose values would take far more memory than their bytes: found before they are parsed."""

from typing import Any

import msgspec
import numpy as np

from rosebatch.core.errors import RowError

# About the bytes of a dict, a list, an item, a name's place in the dicts of a row, and half of a string, as CPython
# 3.11 makes them. An item is counted as a number that is made anew.
_BYTES = {b"{": 200, b"[": 100, b",": 40, b":": 80, b'"': 24}
# Of a shorter line, values take too little to be counted.
SHORT_LINE = 1 << 20
# What the values of a row may take at least.
VALUE_BYTES = 192 << 20
_QUOTE = b'"'[0]


def takes_more(line: bytes, limit: int) -> bool:
    """Whether the values of a line would take more than so many bytes, about, beside their texts."""
    return _bytes(line) > limit and _bytes(_without_texts(line)) > limit


def bounded_json(text: str) -> Any:
    """The value of a text that is JSON.

    Raises:
        RowError: it would take more than ``VALUE_BYTES``.
        msgspec.DecodeError: it is no JSON.
        RecursionError: it is nested too deeply.
    """
    if len(text) > SHORT_LINE and takes_more(text.encode("utf-8", "surrogatepass"), VALUE_BYTES):
        raise RowError("row_too_long", f"its values would take more than {VALUE_BYTES} bytes in memory")
    return msgspec.json.decode(text)


def _bytes(line: bytes) -> int:
    return sum(line.count(mark) * size for mark, size in _BYTES.items())


def _without_texts(line: bytes) -> bytes:
    """The line with all strings empty: what looks like lists in them is text."""
    text = np.frombuffer(line.replace(rb"\\", b"").replace(rb"\"", b""), np.uint8)
    quotes = text == _QUOTE
    kept = np.logical_xor.accumulate(quotes)
    np.logical_not(kept, out=kept)
    kept |= quotes
    return text[kept].tobytes()
