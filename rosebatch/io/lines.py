"""Lines of a file. One that is too long is an error, and memory never holds more of it than the limit."""

from collections.abc import Iterator, Sequence
from functools import partial
from io import BufferedReader

from rosebatch.core.errors import RowError, UserError
from rosebatch.io.table_values import BadValues

# Most bytes of the end of a line. The limit is without it.
LINE_END = 2


def bounded_lines(file: BufferedReader, path: str, limit: int) -> Iterator[bytes | BadValues]:
    """The lines, with their ends.

    A line that is too long is there before it is read past: rows before it need not wait for that.

    Args:
        file: stays open.
        path: for messages.
        limit: most bytes of a line.

    Raises:
        UserError: the file cannot be read.
    """
    try:
        for line in iter(partial(file.readline, limit + LINE_END), b""):
            if len(line) <= limit:
                yield line
                continue
            is_whole = len(line) < limit + LINE_END or line.endswith(b"\n")
            yield line if is_whole and len(line.rstrip(b"\r\n")) <= limit else BadValues({}, too_long(limit))
            if not is_whole:
                skip_line(file)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def skip_line(file: BufferedReader) -> None:
    """Read past the rest of a line. ``readline`` would take four times as long: it puts pieces together."""
    while block := file.peek():
        if end := block.find(b"\n") + 1:
            file.read(end)
            return
        file.read(len(block))


def too_long(limit: int, columns: Sequence[str] = ()) -> RowError:
    """The error of a row that has more bytes than it may have, of a table with the columns that have too many."""
    where = f" with column {', '.join(columns)}" if columns else ""
    return RowError("row_too_long", f"the row has more than {limit} bytes{where}; --max-row-bytes sets another limit")
