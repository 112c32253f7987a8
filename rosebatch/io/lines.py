"""Lines of a file. One that is too long is an error, and memory never holds more of it than the limit."""

from collections.abc import Iterator, Sequence
from functools import partial
from io import BufferedReader

from rosebatch.core.errors import RowError, UserError
from rosebatch.io.parsed_size import SHORT_LINE, VALUE_BYTES, takes_more
from rosebatch.io.table_values import BadValues

# Most bytes of the end of a line. The limit is without it.
LINE_END = 2
# The values of a row may take so many times the bytes that a row may have, or ``VALUE_BYTES``.
_VALUE_TIMES = 6


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
                yield line if len(line) <= SHORT_LINE else bounded(line, limit)
                # Not while the next one is read.
                del line
                continue
            is_whole = len(line) < limit + LINE_END or line.endswith(b"\n")
            is_long = not is_whole or len(line.rstrip(b"\r\n")) > limit
            yield BadValues({}, too_long(limit)) if is_long else bounded(line, limit)
            if not is_whole:
                skip_line(file)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def bounded(line: bytes, limit: int) -> bytes | BadValues:
    """A line or an item of so many bytes at most; the error if its values would take far more."""
    most = max(VALUE_BYTES, _VALUE_TIMES * limit)
    if len(line) <= SHORT_LINE or not takes_more(line, most):
        return line
    told = f"the row's values would take more than {most} bytes in memory; a larger --max-row-bytes allows more"
    return BadValues({}, RowError("row_too_long", told))


def skip_line(file: BufferedReader) -> None:
    """Read past the rest of a line. ``readline`` would take four times as long: it puts pieces together."""
    while block := file.peek():
        if end := block.find(b"\n") + 1:
            file.read(end)
            return
        file.read(len(block))


def too_long(limit: int, columns: Sequence[str] = (), *, in_group: bool = False) -> RowError:
    """The error of a row that has more bytes than it may have, of a table with the columns that have too many.

    With ``in_group``, it may be another row of the same group of a Parquet file, which is not read for that.
    """
    whose = "the row, or another of its row group," if in_group else "the row"
    where = f" with column {', '.join(columns)}" if columns else ""
    return RowError("row_too_long", f"{whose} has more than {limit} bytes{where}; --max-row-bytes sets another limit")
