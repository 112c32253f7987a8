"""The rows of a file of JSON, undecoded: its lines, or the items of an array. One row at a time is in memory."""

import io
import re
import shlex
from collections.abc import Iterator
from typing import IO

import msgspec

from rosebatch.core.errors import UserError
from rosebatch.io.lines import bounded, bounded_lines, too_long
from rosebatch.io.table_values import BadValues

BOM = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n" + BOM
_READ_BYTES = 1 << 18
# A string as far as it is there, with its end; or what divides and nests.
_MARK = re.compile(rb'"(?:[^"\\]++|\\.)*+("?)|[\[\]{},]', re.DOTALL)
_QUOTE, _END = b'"]'
_OPENING, _CLOSING, _DIVIDING = b"[{", b"]}", b",]"
_BEGINNING = b'"[{'


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
    buffer, begin, place, depth, is_long = b"", 0, 0, 0, False
    number, has_ended = 1, False
    while True:
        for mark in _MARK.finditer(buffer, place):
            place = mark.start()
            kind = buffer[place]
            if has_ended and kind in _BEGINNING:
                raise UserError(f"{path}: a comma is missing before byte {before + place + 1}, behind row {number}")
            if kind == _QUOTE and not mark[1]:
                if mark.end() - begin > limit:
                    # The string goes on: with the half of an escape, if there is one.
                    before += mark.end() - 1
                    is_long, buffer, begin, place = True, b'"' + buffer[mark.end() :], 0, 0
                break
            place = mark.end()
            if kind in _OPENING:
                depth += 1
            elif kind in _DIVIDING and not depth:
                text = buffer[begin : mark.start()].strip()
                if not text and not is_long and kind != _END:
                    raise UserError(f"{path}: row {number} is missing before the comma at byte {before + place}")
                yield BadValues({}, too_long(limit)) if is_long or len(text) > limit else bounded(text, limit)
                begin, is_long, has_ended, number = place, False, False, number + 1
                if kind == _END:
                    _require_end(file, buffer[place:], path, before + place)
                    return
            elif kind in _CLOSING and depth:
                depth -= 1
                has_ended = not depth
        else:
            # No mark is in the rest.
            place = len(buffer)
        if place - begin > limit:
            is_long, begin = is_long or bool(buffer[begin:place].strip()), place
        # A long string is looked at again from its start, but with twice as much.
        more = file.read(max(_READ_BYTES, len(buffer) - begin))
        if not more:
            raise UserError(f"{path}: ends inside of its array")
        before += begin
        buffer = buffer[begin:] + more
        begin, place = 0, place - begin


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
