"""Files of tables as rows, some at a time: fewer where rows are long."""

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import repeat
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rosebatch.core.errors import RowError, UserError
from rosebatch.io import arrow_sizes
from rosebatch.io.csv_table import CsvTable
from rosebatch.io.files import file_name
from rosebatch.io.formats import MAGIC_BYTES, Kind, named, table_of
from rosebatch.io.lines import too_long
from rosebatch.io.parquet_parts import parts
from rosebatch.io.parse import Content
from rosebatch.io.read_ahead import GROUP_BYTES
from rosebatch.io.row_sizes import Sizes, row_sizes, shares_or_nests
from rosebatch.io.table_values import BadValues, TextValues, rows_of

# Rows that are decoded at once, and their bytes.
_MAX_ROWS = 256
_MAX_BYTES = 4 << 20
# Of the longest rows, that a batch of Arrow IPC may always have.
_BATCH_ROWS = 4
_BYTES = {pa.string(): pa.binary(), pa.large_string(): pa.large_binary(), pa.string_view(): pa.binary_view()}
_NAMES: dict[Kind, str] = {"parquet": "Parquet", "arrow": "Arrow", "csv": "CSV"}

Wanted = Callable[[str], bool]


class Table(NamedTuple):
    """An open file.

    Attributes:
        schema: names and types of its columns.
        num_rows: None if only reading shows it.
        rows: each row's columns that are wanted by their names, with its share of the bytes. Only once.
    """

    schema: pa.Schema
    num_rows: int | None
    rows: Callable[[Wanted], Iterator[tuple[Content, int]]]


@contextmanager
def open_table(raw: IO[bytes], path: str, kind: Kind, limit: int) -> Iterator[Table]:
    """Open a file of a table.

    Args:
        raw: its bytes.
        path: for messages.
        kind: of the file.
        limit: most bytes of a row.

    Raises:
        UserError: two columns that are read have one name, or it is unreadable; here, or later inside of the ``with``
            block.
    """
    if kind != "csv" and not raw.seekable():
        raise UserError(f"{path}: is {_NAMES[kind]} that is compressed as a whole; only text is read so, decompress it")
    try:
        if kind == "parquet":
            with pq.ParquetFile(raw) as file:
                yield _parquet(file, raw, path, limit)
        else:
            yield _csv(raw, path, limit) if kind == "csv" else _arrow(raw, path, limit)
    except (OSError, ValueError, OverflowError, csv.Error, pa.ArrowException, MemoryError) as error:
        if isinstance(error, UserError):
            raise
        # A damaged length asks for more memory than there is.
        reason = str(error) or type(error).__name__
        raise UserError(f"{path}: unreadable {_NAMES[kind]} file ({reason})") from None


def _distinct(names: Iterable[str], path: str) -> list[str]:
    """The names of the columns of rows. A row cannot have two values of one name."""
    found = list(names)
    for name, times in Counter(found).most_common(1):
        if times > 1:
            raise UserError(f"{path}: has two columns {name!r}")
    return found


def _parquet(file: pq.ParquetFile, raw: IO[bytes], path: str, limit: int) -> Table:
    """PyArrow itself holds one row group of the file, and pages of it decompressed."""

    def rows(wanted: Wanted) -> Iterator[tuple[Content, int]]:
        names = _distinct(filter(wanted, file.schema_arrow.names), path)
        if not names:
            yield from repeat(({}, 0), file.metadata.num_rows)
            return
        for part in parts(raw, file, names, limit):
            left = [name for name in names if name not in part.long]
            error = too_long(limit, part.long, in_group=True)
            if not left:
                num_rows = sum(file.metadata.row_group(group).num_rows for group in part.groups)
                yield from repeat((BadValues({}, error), 0), num_rows)
                continue
            # It reads the schema again; not the file's own metadata, which may be large.
            shared = part.shared and pq.ParquetFile(raw, metadata=file.metadata, read_dictionary=part.shared)
            for batch in (shared or file).iter_batches(part.rows_at_once, row_groups=part.groups, columns=left):
                found = _batch_rows(batch, wanted, limit)
                yield from found if not part.long else ((_failed(content, error), size) for content, size in found)
                # Not while the next one is read.
                del batch

    return Table(file.schema_arrow, file.metadata.num_rows, rows)


def _failed(content: dict[str, Any] | BadValues, error: RowError) -> BadValues:
    return content if isinstance(content, BadValues) else BadValues(content, error)


def _arrow(raw: IO[bytes], path: str, limit: int) -> Table:
    """An Arrow IPC file or stream. One record batch is in memory at a time."""
    head = raw.read(MAGIC_BYTES)
    raw.seek(0)
    is_stream = table_of(head) == "arrow" and not head.startswith(b"ARROW1")
    reader = pa.ipc.open_stream(raw) if is_stream else pa.ipc.open_file(raw)

    def batches() -> Iterator[pa.RecordBatch]:
        if not is_stream:
            for number, _ in enumerate(arrow_sizes.each_checked(raw, _BATCH_ROWS * limit)):
                yield reader.get_batch(number)
            return
        while True:
            arrow_sizes.require_next(raw, _BATCH_ROWS * limit)
            try:
                batch = reader.read_next_batch()
            except StopIteration:
                return
            yield batch
            del batch

    def rows(wanted: Wanted) -> Iterator[tuple[Content, int]]:
        _distinct(filter(wanted, reader.schema.names), path)
        for batch in batches():
            _require_valid(batch)
            yield from _batch_rows(batch, wanted, limit)
            del batch

    return Table(_plain(reader.schema), None, rows)


def _require_valid(batch: pa.RecordBatch) -> None:
    """Arrow itself checks no offset that it reads, and a wrong one leads to any byte of the process."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        kind = _BYTES.get(column.type)
        try:
            # A text that is not UTF-8 fails its row alone, later.
            (column if kind is None else column.view(kind)).validate(full=True)
        except pa.ArrowInvalid as error:
            raise pa.ArrowInvalid(f"column {name!r}: {error}") from None


def _plain(schema: pa.Schema) -> pa.Schema:
    """The types that results carry on: a column of a dictionary's numbers holds its values."""
    fields = [
        field.with_type(field.type.value_type) if pa.types.is_dictionary(field.type) else field for field in schema
    ]
    return pa.schema(fields, schema.metadata)


def _batch_rows(
    batch: pa.RecordBatch, wanted: Wanted, limit: int
) -> Iterator[tuple[dict[str, object] | BadValues, int]]:
    names = [name for name in batch.schema.names if wanted(name)]
    if not names:
        # A batch without columns has no rows.
        yield from repeat(({}, 0), batch.num_rows)
        return
    batch = batch.select(names)
    if batch.get_total_buffer_size() <= limit and not any(shares_or_nests(column.type) for column in batch.columns):
        yield from _short_rows(batch)
        return
    sizes: Sizes = np.sum([row_sizes(column) for column in batch.columns], axis=0)
    ends = np.cumsum(sizes)
    start = 0
    while start < batch.num_rows:
        # A row that is too long is alone.
        full = np.searchsorted(ends, ends[start] - sizes[start] + min(_MAX_BYTES, limit), side="right")
        stop = max(start + 1, min(start + _MAX_ROWS, int(full)))
        rows = batch.slice(start, stop - start)
        if sizes[start] > limit:
            yield _long_row(rows, limit), GROUP_BYTES
        else:
            yield from zip(rows_of(rows), sizes[start:stop].tolist(), strict=True)
        start = stop


def _short_rows(batch: pa.RecordBatch) -> Iterator[tuple[dict[str, object] | BadValues, int]]:
    """All rows of a batch that is no larger than a row may be."""
    size = batch.get_total_buffer_size() // max(batch.num_rows, 1)
    step = max(1, min(_MAX_ROWS, _MAX_BYTES // max(size, 1)))
    for start in range(0, batch.num_rows, step):
        yield from zip(rows_of(batch.slice(start, step)), repeat(size), strict=False)


def _long_row(row: pa.RecordBatch, limit: int) -> BadValues:
    """The error of a row, with the columns that have room without the longest one."""
    sizes = np.array([row_sizes(column)[0] for column in row.columns])
    longest = int(sizes.argmax())
    fits = sizes.sum() - sizes[longest] <= limit
    kept = [name for place, name in enumerate(row.schema.names) if fits and place != longest]
    (values,) = rows_of(row.select(kept)) if kept else ({},)
    return _failed(values, too_long(limit, [row.schema.names[longest]]))


def _bounded(row: TextValues | BadValues, limit: int) -> TextValues | BadValues:
    """A row of CSV; if it is too long, its error, with the columns that have room without the longest one."""
    sizes = {name: len(cell.encode()) for name, cell in row.values.items() if cell}
    if (size := sum(sizes.values())) <= limit:
        return row
    longest = max(sizes, key=sizes.__getitem__)
    kept = {name: cell for name, cell in row.values.items() if name != longest and size - sizes[longest] <= limit}
    return BadValues(kept, too_long(limit, [longest]))


def _csv(raw: IO[bytes], path: str, limit: int) -> Table:
    table = CsvTable(raw, path, named(file_name(path)).separator, limit)
    _distinct(table.names, path)

    def rows(wanted: Wanted) -> Iterator[tuple[Content, int]]:
        unread = [name for name in table.names if not wanted(name)]
        for row, size in table.rows():
            for name in unread:
                row.values.pop(name, None)
            yield row if size <= limit else _bounded(row, limit), size

    return Table(pa.schema([(name, pa.string()) for name in table.names]), None, rows)
