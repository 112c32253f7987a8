"""How deep each byte of JSON is nested, a block at a time: arrays of its bytes, for there may be very many marks."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Flags = np.ndarray[Any, np.dtype[np.bool_]]
# At once: arrays of these stay in the processor's cache.
BLOCK = 1 << 13
QUOTE, COMMA, END = b'",]'
CLOSING = b"]}"
# What each byte adds to the depth.
_STEPS = np.zeros(256, np.int8)
_STEPS[list(b"[{")], _STEPS[list(CLOSING)] = 1, -1


class Block(NamedTuple):
    """What was found in a block, a number for each byte.

    Attributes:
        found: the bytes, where escapes in texts are blanks.
        quotes: whether it begins or ends a text.
        in_text: whether it is in a text, of whose quotes the first is.
        steps: 1 where a list or an object begins, -1 where one ends.
        depths: how many are open behind it.
    """

    found: Bytes
    quotes: Flags
    in_text: Flags
    steps: "np.ndarray[Any, np.dtype[np.int8]]"
    depths: "np.ndarray[Any, np.dtype[np.int32]]"


class Nesting:
    """Follows a text from its beginning; texts may go on from block to block."""

    def __init__(self) -> None:
        self._depth = 0
        self._in_text = self._is_escaped = False

    def of(self, block: bytes) -> Block | None:
        """The next block; None if all of it is in one text."""
        # Escapes, of the same length; that before the block may be the first half of one.
        plain = (b"\\" * self._is_escaped + block).replace(rb"\\", b"  ").replace(rb"\"", b"  ")[self._is_escaped :]
        self._is_escaped = plain.endswith(b"\\")
        if self._in_text and b'"' not in plain:
            return None
        found = np.frombuffer(plain, np.uint8)
        quotes = found == QUOTE
        in_text = np.logical_xor.accumulate(quotes)
        if self._in_text:
            np.logical_not(in_text, out=in_text)
        self._in_text = bool(in_text[-1])
        steps = _STEPS[found]
        steps *= ~in_text
        depths = np.cumsum(steps, dtype=np.int32)
        depths += self._depth
        self._depth = int(depths[-1])
        return Block(found, quotes, in_text, steps, depths)


def blocks(text: bytes) -> Iterator[tuple[int, Block]]:
    """The blocks of a text that have more than a part of one text, and where they begin."""
    nesting = Nesting()
    for start in range(0, len(text), BLOCK):
        if (block := nesting.of(text[start : start + BLOCK])) is not None:
            yield start, block


def depth(text: bytes) -> int:
    """How many lists and objects are open at most."""
    return max((int(block.depths.max()) for _, block in blocks(text)), default=0)
