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
        UserError: it has no names of columns.
        csv.Error: it is no CSV.
    """

    def __init__(self, raw: IO[bytes], path: str, separator: str) -> None:
        csv.field_size_limit(_MAX_CHARACTERS)
        text = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")
        self._rows = csv.reader(text, delimiter=separator, strict=True)
        self.names = next(self._rows, [])
        # Else the end of the wrapper would close the file.
        self._text = text
        if not self.names:
            raise UserError(f"{path}: is empty, but the first row of a CSV file has the names of its columns")

    def rows(self) -> Iterator[tuple[TextValues | BadValues, int]]:
        """Each row with its bytes. A row with too many or too few cells, or with bad text, fails by itself."""
        for cells in self._rows:
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
