"""JSON as we write it, made a piece at a time: all of it as Python's values would take many times its bytes."""

from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from rosebatch.io.json_nesting import COMMA, blocks

_decode, _encode = msgspec.json.decode, msgspec.json.encode
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_PIECE = 1 << 18
# Of lists and objects in each other that are taken apart: each of these levels is read once more.
_LEVELS = 4


def rewritten(text: bytes, levels: int = _LEVELS) -> bytes:
    """The same bytes as decoding and encoding all at once.

    Raises:
        msgspec.DecodeError, UnicodeDecodeError, RecursionError: it is no JSON.
    """
    if len(text) > _PIECE and levels:
        if text.startswith(b"{"):
            fields = _FIELDS.decode(text)
            whole = {name: msgspec.Raw(rewritten(bytes(field), levels - 1)) for name, field in fields.items()}
            return _encode(whole)
        if text.startswith(b"["):
            written = [each for piece in _pieces(text) for each in (b",", _items(piece, levels - 1))]
            return b"".join([b"[", *written[1:], b"]"])
    return _encode(_decode(text))


def _items(text: bytes, levels: int) -> bytes:
    """Items of a list, with the commas between them. One that is large comes alone."""
    if len(text) > _PIECE:
        return rewritten(text.strip(), levels)
    return _encode(_decode(b"[%s]" % text))[1:-1]


def _pieces(text: bytes) -> Iterator[bytes]:
    """The items of a list, in groups of some bytes."""
    commas = _commas(text)
    start, last = 1, len(text) - 1
    while start <= last:
        # The last comma of a piece, or the first one behind it.
        number = int(np.searchsorted(commas, start + _PIECE, "right"))
        if last - start <= _PIECE:
            end = last
        elif number and commas[number - 1] >= start:
            end = int(commas[number - 1])
        else:
            end = int(commas[number]) if number < len(commas) else last
        yield text[start:end]
        start = end + 1


def _commas(text: bytes) -> "np.ndarray[Any, np.dtype[np.intp]]":
    """Places of the commas between the items of a list."""
    if all(text.find(mark, 1) < 0 for mark in (b'"', b"[", b"{")):
        return np.flatnonzero(np.frombuffer(text, np.uint8) == COMMA)
    return np.concatenate(
        [start + np.flatnonzero((b.found == COMMA) & (b.depths == 1) & ~b.in_text) for start, b in blocks(text)]
    )
