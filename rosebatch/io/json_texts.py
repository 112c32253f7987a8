"""The rows of a file of JSON, undecoded: its lines, or the items of an array. One row at a time is in memory."""

import io
import shlex
from collections.abc import Iterator
from functools import partial
from typing import IO

import msgspec
import numpy as np

from rosebatch.core.errors import UserError
from rosebatch.io.json_nesting import BLOCK, CLOSING, COMMA, END, QUOTE, Nesting
from rosebatch.io.lines import bounded, bounded_lines, too_long
from rosebatch.io.table_values import BadValues

BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n" + BOM
_READ_BYTES = 1 << 18


def stripped(line: bytes) -> bytes:
    """A line without byte order mark and surrounding white space; empty for a blank line."""
    return line.removeprefix(BOM).strip()


def lines_or_items(file: io.BufferedReader, path: str, limit: int) -> Iterator[bytes | BadValues]:
    """The items of an array, or the lines of a file that is none; arguments as of ``bounded_lines``.

    Raises:
        UserError: it is neither, or cannot be read.
    """
    try:
        before = 1
        while (head := file.peek(1)[:1]) and head in _BLANK:
            before += len(file.read(1))
        if head == b"[":
            file.read(1)
            yield from _items(file, path, limit, before)
            return
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None
    for number, line in enumerate(bounded_lines(file, path, limit)):
        if not number and isinstance(line, bytes):
            _require_whole(line, path)
        yield line


def _require_whole(line: bytes, path: str) -> None:
    try:
        msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # Other damage is the row's.
        if "truncated" in str(error):
            message = "is neither an array of objects nor one object per line; put [ and ] around a single object"
            raise UserError(f"{path}: {message}, or make lines: jq -c . {shlex.quote(path)} > prompts.jsonl") from None


def _items(file: IO[bytes], path: str, limit: int, before: int) -> Iterator[bytes | BadValues]:
    """The items of an array whose bracket was read. One that is too long is read past.

    Args:
        file, path, limit: as of ``lines_or_items``.
        before: bytes of the file up to the bracket.

    Raises:
        UserError: there is more than one value between two commas, or none; or the file goes on behind the array.
    """
    marks = _Marks()
    number, pieces, size, is_long, has_ended = 1, list[bytes](), 0, False, False
    for block in iter(partial(file.read, _READ_BYTES), b""):
        begin = 0
        for place, depth in marks.of(block):
            kind = block[place]
            if kind == COMMA or (kind == END and depth < 0):
                text = b"".join([*pieces, block[begin:place]]).strip()
                pieces.clear()
                if not text and not is_long and kind == COMMA:
                    raise UserError(f"{path}: row {number} is missing before the comma at byte {before + place + 1}")
                if not is_long:
                    yield BadValues({}, too_long(limit)) if len(text) > limit else bounded(text, limit)
                # Not while the next one is read.
                del text
                if kind == END:
                    _require_end(file, block[place + 1 :], path, before + place + 1)
                    return
                begin, number, size, is_long, has_ended = place + 1, number + 1, 0, False, False
            elif depth < 0:
                raise UserError(f"{path}: }} at byte {before + place + 1} closes nothing, in row {number}")
            elif kind in CLOSING:
                has_ended = True
            elif has_ended:
                raise UserError(f"{path}: a comma is missing before byte {before + place + 1}, behind row {number}")
            else:
                has_ended = kind == QUOTE
        rest = block[begin:] if pieces else block[begin:].lstrip()
        size += len(rest)
        if is_long or size > limit:
            if not is_long:
                # Rows before it need not wait until it is read past.
                yield BadValues({}, too_long(limit))
            is_long = True
            pieces.clear()
        elif rest:
            pieces.append(rest)
        before += len(block)
    raise UserError(f"{path}: ends inside of its array")


class _Marks:
    """Finds what divides the items of an array, a block of the file at a time."""

    def __init__(self) -> None:
        self._nesting = Nesting()

    def of(self, block: bytes) -> Iterator[tuple[int, int]]:
        """The marks of a block: see ``_of``."""
        for start in range(0, len(block), BLOCK):
            for place, depth in self._of(block[start : start + BLOCK]):
                yield start + place, depth

    def _of(self, block: bytes) -> Iterator[tuple[int, int]]:
        """Places of commas between items, and of the first and last mark of texts, lists and objects that are items.

        With each comes the depth behind it: 0 for an item that has ended, -1 for the end of the array.
        """
        if (nested := self._nesting.of(block)) is None or nested.depths.min() > 1:
            return iter(())
        found, quotes, in_text, steps, depths = nested
        is_mark = (depths <= 0) & ((steps < 0) | ((found == COMMA) & ~in_text) | (quotes & in_text))
        is_mark |= (depths == 1) & (steps > 0)
        places = np.flatnonzero(is_mark)
        return zip(places.tolist(), depths[places].tolist(), strict=True)


def _require_end(file: IO[bytes], rest: bytes, path: str, before: int) -> None:
    """Check that blanks alone follow an array; ``before`` are the bytes up to ``rest``."""
    rest = rest or file.read(_READ_BYTES)
    while rest:
        if text := rest.lstrip():
            raise UserError(
                f"{path}: goes on behind the end of its array, at byte {before + len(rest) - len(text) + 1}"
            )
        before += len(rest)
        rest = file.read(_READ_BYTES)
