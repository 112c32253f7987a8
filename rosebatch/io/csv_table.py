"""CSV files as rows. A file has no types, so all cells are texts; an empty cell is null."""

import csv
import io
from collections.abc import Iterator
from typing import IO

from rosebatch.core.errors import RowError, UserError
from rosebatch.io.table_values import BadValues, TextValues

# Of a cell. Python's own limit is 128 KiB.
_MAX_CHARACTERS = 2**31 - 1


class CsvTable:
    """A CSV file whose first row has the names of its columns.

    Args:
        raw: its bytes. Cells in quotes may hold line breaks.
        path: for messages.
        separator: of the cells.

    Raises:
        UserError: it has no names of columns, or they are not UTF-8.
        csv.Error: its first row is no CSV.
    """

    def __init__(self, raw: IO[bytes], path: str, separator: str) -> None:
        csv.field_size_limit(_MAX_CHARACTERS)
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")
        self._rows = csv.reader(text, delimiter=separator, strict=True)
        self._path = path
        self.names = next(self._rows, [])
        # Else the end of the wrapper would close the file.
        self._text = text
        if not self.names:
            raise UserError(f"{path}: is empty, but the first row of a CSV file has the names of its columns")
        if not all(map(_is_text, self.names)):
            raise UserError(
                f"{path}: the names of its columns are not UTF-8; convert it, such as from Windows: "
                "iconv -f cp1252 -t utf-8"
            )

    def rows(self) -> Iterator[tuple[TextValues | BadValues, int]]:
        """Each row with its bytes. One that is no CSV, has too many or too few cells, or bad text, fails by itself.

        Raises:
            UserError: a quote is never closed: it swallowed the rest of the file.
        """
        while True:
            begin = self._rows.line_num + 1
            try:
                cells = next(self._rows, None)
            except csv.Error as error:
                if "unexpected end of data" in str(error):
                    raise UserError(f"{self._path}: a quote of the row in line {begin} is never closed") from None
                # The reader goes on behind the line.
                message = f"no CSV in line {self._rows.line_num}: {error}; a quote inside of a cell is written twice"
                yield BadValues({}, RowError("invalid_value", message)), 0
                continue
            if cells is None:
                return
            if cells:
                yield self._row(cells)

    def _row(self, cells: list[str]) -> tuple[TextValues | BadValues, int]:
        values = {name: cell or None for name, cell in zip(self.names, cells, strict=False)}
        if len(cells) != len(self.names):
            message = f"expected {len(self.names)} cells, as the first row has, got {len(cells)}"
            return BadValues(values, RowError("invalid_value", message)), sum(map(len, cells))
        try:
            return TextValues(values), len("".join(cells).encode())
        except UnicodeEncodeError:
            bad = next(name for name, cell in values.items() if cell is not None and not _is_text(cell))
            kept = {name: cell for name, cell in values.items() if cell is None or _is_text(cell)}
            return BadValues(kept, RowError("invalid_value", f"column {bad} has text that is not UTF-8")), len(cells)


def _is_text(cell: str) -> bool:
    try:
        cell.encode()
    except UnicodeEncodeError:
        return False
    return True
