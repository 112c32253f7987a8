"""A file of prompts -> rows: Parquet by its extension, else JSONL of our own fields or of an OpenAI batch."""

import hashlib
import sys
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any, Literal

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from rosebatch.errors import RowError, UserError
from rosebatch.io.openai_batch import is_request, parse_request
from rosebatch.io.rows import FailedRow, PromptRow, parse_row
from rosebatch.io.seen_ids import SeenIds

Row = PromptRow | FailedRow

PARQUET_SUFFIXES = (".parquet", ".pq")

InputFormat = Literal["auto", "jsonl", "openai", "parquet"]

_MOST_PEEKED = 100
_BOM = b"\xef\xbb\xbf"


class PromptReader:
    """The rows of an input, with duplicate ids refused.

    Args:
        source: a path, or ``-`` for stdin.
        defaults: sampling fields for where a line is silent.
        input_format: ``auto`` tells an OpenAI batch by the first line that is JSON.

    Raises:
        UserError: the file is missing or unreadable.
    """

    def __init__(self, source: str, defaults: Mapping[str, Any], input_format: InputFormat = "auto") -> None:
        self.source = source
        self.defaults = defaults
        by_name = Path(source).suffix.lower() in PARQUET_SUFFIXES
        self.is_parquet = by_name if input_format == "auto" else input_format == "parquet"
        self.columns: pa.Schema | None = None
        if source != "-" and not Path(source).is_file():
            raise UserError(f"{source}: {'is a folder' if Path(source).is_dir() else 'no such file'}")
        if self.is_parquet:
            with self._parquet() as file:
                self.columns = file.schema_arrow
        self._input_format = input_format
        # Lines of stdin that were looked at, and are yet to be read.
        self._peeked: list[bytes] = []

    @cached_property
    def is_batch(self) -> bool:
        """Whether the lines are requests of an OpenAI batch; of stdin this waits for the first line."""
        if self._input_format == "auto" and not self.is_parquet:
            return self._looks_like_a_batch()
        return self._input_format == "openai"

    def count(self) -> int | None:
        """Rows in the input, None where that cannot be known beforehand."""
        if self.source == "-":
            return None
        if self.is_parquet:
            with self._parquet() as file:
                rows: int = file.metadata.num_rows
                return rows
        with self._open() as file:
            return sum(1 for line in file if _text(line))

    def __iter__(self) -> Iterator[Row]:
        """Rows in input order; raises UserError where the input cannot be read on."""
        seen = SeenIds()
        for row in self._parquet_rows() if self.is_parquet else self._jsonl_rows():
            if isinstance(row, PromptRow) and row.id is not None and not seen.add(row.id):
                error = RowError("duplicate_id", f"id {row.id!r} was used by an earlier row")
                yield FailedRow(index=row.index, where=row.where, metadata=row.metadata, error=error)
            else:
                yield row

    def carried(self) -> Iterator[Mapping[str, Any]]:
        """Of each row what is carried through to its result, once more; not from stdin."""
        for row in self._parquet_rows() if self.is_parquet else self._jsonl_rows():
            yield row.metadata

    def digest(self) -> str:
        """SHA-256 of the file."""
        with Path(self.source).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    def _looks_like_a_batch(self) -> bool:
        """By the first line that is JSON, of the first few; of stdin they are kept."""
        file = self._open()
        try:
            for line in islice(_lines(file, self.source), _MOST_PEEKED):
                if self.source == "-":
                    self._peeked.append(line)
                try:
                    return is_request(msgspec.json.decode(_text(line)))
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                    continue
            return False
        finally:
            if self.source != "-":
                file.close()

    def _open(self) -> IO[bytes]:
        if self.source == "-":
            return sys.stdin.buffer
        try:
            return Path(self.source).open("rb")
        except OSError as error:
            raise UserError(f"{self.source}: {error.strerror}") from None

    def _jsonl_rows(self) -> Iterator[Row]:
        index = 0
        parse = parse_request if self.is_batch else parse_row
        with self._open() as file:
            for number, line in enumerate(chain(self._peeked, _lines(file, self.source)), start=1):
                text = _text(line)
                if not text:
                    continue
                where = f"line {number}"
                try:
                    values = msgspec.json.decode(text)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                    failure = RowError("invalid_json", f"not valid JSON: {error}")
                    yield FailedRow(index=index, where=where, metadata={}, error=failure)
                else:
                    yield parse(values, index=index, where=where, defaults=self.defaults)
                index += 1

    def _parquet(self) -> pq.ParquetFile:
        try:
            return pq.ParquetFile(self.source)
        except (OSError, pa.ArrowException) as error:
            raise UserError(f"{self.source}: unreadable Parquet file ({error})") from None

    def _parquet_rows(self) -> Iterator[Row]:
        index = 0
        with self._parquet() as file:
            try:
                for batch in file.iter_batches(batch_size=1024):
                    for values in _python_types(batch).to_pylist():
                        where = f"row {index + 1}"
                        yield parse_row(values, index=index, where=where, defaults=self.defaults, keep_prompt=True)
                        index += 1
            # Arrow raises ValueError for what Python cannot hold: years past 9999, strings that are not UTF-8.
            except (OSError, ValueError, OverflowError, pa.ArrowException) as error:
                raise UserError(f"{self.source}: unreadable Parquet file ({error})") from None


def _python_types(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Nanoseconds as integers: Python's own types stop at microseconds."""
    columns = [column.cast(_without_nanoseconds(column.type)) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _without_nanoseconds(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(_without_nanoseconds(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_without_nanoseconds(kind.value_type)))
    if kind in (pa.time64("ns"), pa.duration("ns")) or (pa.types.is_timestamp(kind) and kind.unit == "ns"):
        return pa.int64()
    return kind


def _lines(file: IO[bytes], source: str) -> Iterator[bytes]:
    try:
        # Not ``yield from``, which closes the file when this generator is given up.
        for line in file:  # noqa: UP028
            yield line
    except OSError as error:
        raise UserError(f"{source}: {error.strerror}") from None


def _text(line: bytes) -> bytes:
    """A line without byte order mark and surrounding white space; empty for a blank line."""
    return line.removeprefix(_BOM).strip()
