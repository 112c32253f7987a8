"""CSV files as rows. A file has no types, so all cells are texts; an empty cell is null."""

import csv
import io
import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache, partial
from itertools import chain, islice
from typing import IO, Any

from rosebatch.core.errors import RowError, UserError
from rosebatch.core.plain import is_text
from rosebatch.core.words import counted
from rosebatch.io.json_hints import TO_UTF8
from rosebatch.io.lines import too_long
from rosebatch.io.table_values import BadValues, TextValues

# Of a cell. Python's own limit is 128 KiB.
_MAX_CHARACTERS = 2**31 - 1
# Of a row that is read past, at once.
_SKIPPED_CHARACTERS = 1 << 20
# Of a line that needs no look: each takes up to 60 bytes as text.
_FEW_CELLS = 1 << 20
# Lines of one row that are put together: a line of three characters takes 60 bytes.
_LINES_TOGETHER = 1 << 16
# Columns that a file may have. Each takes some 1,000 bytes, in the schema and in every row.
_MAX_COLUMNS = 1 << 16
_TEXT = '(?:[^"]++|"")*+'


class _LongRowError(Exception):
    """The row that is being read has too many characters, or cells. Its argument says so, as a RowError."""


class _PlainRowError(Exception):
    """The row that is being read is one long line without quotes, its argument."""


class CsvTable:
    """A CSV file whose first row has the names of its columns.

    Args:
        raw: its bytes. Cells in quotes may hold line breaks.
        path: for messages.
        separator: of the cells.
        limit: most bytes of a row. One of more than twice as much is read past, and memory never holds more of it.

    Raises:
        UserError: it has no names of columns, or they are not UTF-8.
        csv.Error: its first row is no CSV. Empty lines before it do not count.
    """

    def __init__(self, raw: IO[bytes], path: str, separator: str, limit: int) -> None:
        csv.field_size_limit(_MAX_CHARACTERS)
        # Else the end of the wrapper would close the file.
        self._text = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")
        self._path, self._separator, self._limit = path, separator, limit
        # A quote inside of a cell is two in the file; each cell may have two more and a separator.
        self._most = 2 * limit + _SKIPPED_CHARACTERS
        self._lines_before = 0
        # Of the row that is read: many lines put together, and the last lines.
        self._begun: list[str] = []
        self._row: list[str] = []
        self._size = 0
        self._rows = self._reader()
        self._in_quotes = re.compile(f'(?:^|(?<={re.escape(separator)}))"{_TEXT}"?')
        self.names: list[str] = []
        try:
            self.names = next(filter(None, self._rows), [])
        except _LongRowError as error:
            raise UserError(f"{path}: the names of its columns: {error.args[0].message}") from None
        if not self.names:
            raise UserError(f"{path}: is empty, but the first row of a CSV file has the names of its columns")
        if len(self.names) > _MAX_COLUMNS:
            raise UserError(f"{path}: the names of its columns: it has {len(self.names)}, more than {_MAX_COLUMNS}")
        if not all(map(is_text, self.names)):
            raise UserError(f"{path}: the names of its columns are not UTF-8{TO_UTF8}")
        # Counted for each row: its result repeats them as keys.
        self._names_size = sum(len(name.encode()) for name in self.names)

    def rows(self) -> Iterator[tuple[TextValues | BadValues, int]]:
        """Each row with its bytes. One that is no CSV, has too many or too few cells, or bad text, fails by itself.

        Raises:
            UserError: a quote is never closed: it swallowed the rest of the file.
        """
        while True:
            begin = self._begin_row()
            try:
                cells = next(self._rows, None)
            except _PlainRowError as error:
                # Python's reader takes four bytes for each character.
                cells = error.args[0].rstrip("\r\n").split(self._separator)
                self._rows, self._lines_before = self._reader(), begin
            except _LongRowError as error:
                yield BadValues({}, error.args[0]), 0
                self._skip_row()
                continue
            except csv.Error as error:
                if "unexpected end of data" in str(error):
                    raise UserError(f"{self._path}: a quote of the row in line {begin} is never closed") from None
                # The reader goes on behind the line.
                line = self._lines_before + self._rows.line_num
                message = f"no CSV in line {line}: {error}; a quote inside of a cell is written twice"
                yield BadValues({}, RowError("invalid_value", message)), 0
                continue
            if cells is None:
                return
            if cells:
                size = self._size
                self._begin_row()
                yield self._checked(cells, size)
                # Not while the next row is read.
                del cells

    def _begin_row(self) -> int:
        """Forget the row that was read; returns the line in which the next one begins."""
        if self._size > _SKIPPED_CHARACTERS:
            # A reader keeps four bytes for each character of its longest cell.
            self._rows, self._lines_before = self._reader(), self._lines_before + self._rows.line_num
        self._begun.clear()
        self._row.clear()
        self._size = 0
        return self._lines_before + int(self._rows.line_num) + 1

    def _reader(self) -> Any:
        return csv.reader(self._lines(), delimiter=self._separator, strict=True)

    def _lines(self) -> Iterator[str]:
        row, most = self._row, self._most
        for line in iter(partial(self._text.readline, most), ""):
            if len(row) == _LINES_TOGETHER:
                self._begun.append("".join(row))
                row.clear()
            row.append(line)
            self._size += len(line)
            if self._size >= most:
                raise _LongRowError(too_long(self._limit))
            if (
                len(line) > _FEW_CELLS
                and (cells := self._cells(line, quoted=self._size > len(line))) > self._most_cells
            ):
                raise _LongRowError(self._unequal(cells))
            if len(line) > _SKIPPED_CHARACTERS and self._size == len(line) and '"' not in line and self.names:
                raise _PlainRowError(line)
            yield line

    def _cells(self, line: str, *, quoted: bool) -> int:
        """How many cells a line has, about; if they are few, at most. ``quoted``: it begins inside of quotes."""
        found = 1 + line.count(self._separator)
        if found > self._most_cells:
            line = '"' * quoted + line
            # Between two of them is a separator: of more, the row has too many cells anyway.
            some = islice(self._in_quotes.finditer(line), self._most_cells + 2)
            found -= sum(line.count(self._separator, *each.span()) for each in some)
        return found

    @property
    def _most_cells(self) -> int:
        return max(_FEW_CELLS, len(self.names))

    def _unequal(self, cells: int) -> RowError:
        """The error of a row that has more or fewer cells than there are columns."""
        told = f"expected {counted(len(self.names), 'cell')}, as the first row has, got {cells}"
        return RowError("invalid_value", told if self.names else f"it has {cells}, more than {_FEW_CELLS}")

    def _skip_row(self) -> None:
        """Read past the rest of a row.

        Raises:
            UserError: a quote of it is never closed.
        """
        lines = self._lines_before + self._rows.line_num + 1 - len(self._row)
        begin = lines - len(self._begun) * _LINES_TOGETHER + 1
        quoted, opens = False, True
        for piece in self._begun:
            quoted, opens = _quoted(piece, self._separator, quoted=quoted, opens=opens)
        for piece in chain(self._row, iter(partial(self._text.readline, _SKIPPED_CHARACTERS), "")):
            quoted, opens = _quoted(piece, self._separator, quoted=quoted, opens=opens)
            if piece.endswith(("\n", "\r")):
                lines += 1
                if not quoted:
                    break
        if quoted:
            raise UserError(f"{self._path}: a quote of the row in line {begin} is never closed")
        self._rows, self._lines_before, self._size = self._reader(), lines, 0
        self._begun.clear()
        self._row.clear()

    def _checked(self, cells: list[str], size: int) -> tuple[TextValues | BadValues, int]:
        """The row of some cells, which have so many characters, about."""
        values = {name: cell or None for name, cell in zip(self.names, cells, strict=False)}
        if len(cells) == len(self.names):
            with suppress(UnicodeEncodeError):
                # Of many characters, without a copy of all.
                pieces = cells if size > _SKIPPED_CHARACTERS else ["".join(cells)]
                return TextValues(values), self._names_size + sum([len(each.encode()) for each in pieces])
        kept = {name: cell for name, cell in values.items() if cell is None or is_text(cell)}
        error = self._unequal(len(cells))
        if len(cells) == len(self.names):
            bad = next(name for name in values if name not in kept)
            error = RowError("invalid_value", f"column {bad} has text that is not UTF-8{TO_UTF8}")
        return BadValues(kept, error), sum(map(len, cells))


@cache
def _texts(separator: str) -> re.Pattern[str]:
    """The text of a cell in quotes, and of those that follow, with what is between them."""
    sep = re.escape(separator)
    return re.compile(f'(?:{_TEXT}"{sep}(?:[^"]*{sep})?")*+{_TEXT}')


def _end_of_texts(piece: str, place: int, separator: str) -> int:
    """Where a cell in quotes ends, with its quote or the piece: two quotes inside of it are one of its text.

    Further cells in quotes are passed: there may be millions.
    """
    found = _texts(separator).match(piece, place)
    assert found is not None, "it may be empty"
    return found.end()


def _quoted(piece: str, separator: str, *, quoted: bool, opens: bool) -> tuple[bool, bool]:
    """Whether a piece of a row ends inside of quotes, and whether a quote behind it opens some.

    Args:
        quoted: whether it begins inside of quotes.
        opens: whether a quote at its begin opens some.
    """
    opener, place = 0 if opens else -1, 0
    while True:
        if quoted:
            place = _end_of_texts(piece, place, separator)
            if place == len(piece):
                break
            quoted, opener = False, place + 1
        elif (place := piece.find('"', place)) >= 0:
            quoted = place == opener or piece[place - 1 : place] == separator
        else:
            break
        place += 1
    return quoted, opener == len(piece) or piece.endswith(separator)
