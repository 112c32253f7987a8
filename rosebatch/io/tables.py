"""Parquet files as rows, some at a time: fewer where rows are long."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from rosebatch.errors import UserError
from rosebatch.io.cells import BadCells, rows_of

# Rows that are decoded at once, and their bytes. A file's dictionary of long values may hide how long its rows are.
_MOST_ROWS = 256
_MOST_BYTES = 4 << 20


@contextmanager
def open_table(raw: IO[bytes], path: str) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file.

    Args:
        raw: its bytes.
        path: for messages.

    Raises:
        UserError: it is unreadable, here or later inside of the ``with`` block.
    """
    try:
        with pq.ParquetFile(raw) as file:
            yield file
    except (OSError, ValueError, OverflowError, pa.ArrowException) as error:
        raise UserError(f"{path}: unreadable Parquet file ({error})") from None


def table_rows(file: pq.ParquetFile) -> Iterator[tuple[dict[str, Any] | BadCells, int]]:
    """Each row with its share of the bytes. PyArrow itself holds one row group of the file."""
    for batch in file.iter_batches(_rows_at_once(file.metadata)):
        size = batch.nbytes // max(batch.num_rows, 1)
        for values in rows_of(batch):
            yield values, size


def _rows_at_once(metadata: pq.FileMetaData) -> int:
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    longest = max((group.total_byte_size // max(group.num_rows, 1) for group in groups), default=0)
    return max(1, min(_MOST_ROWS, _MOST_BYTES // max(longest, 1)))
