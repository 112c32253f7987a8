"""Files of prompts -> rows. Parquet by extension, else JSONL: rosebatch's own fields or an OpenAI batch."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from itertools import chain, islice
from operator import attrgetter
from pathlib import Path
from typing import IO, Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
from msgspec.structs import replace

from rosebatch.config import InputFormat
from rosebatch.errors import FlagError, UserError, printable
from rosebatch.host.file_state import FileState
from rosebatch.host.paths import is_stream
from rosebatch.io.files import as_path, digest, find_files, is_parquet, is_url, open_file
from rosebatch.io.openai.lines import is_request
from rosebatch.io.parse import Record, Row, RowParser
from rosebatch.io.piped import Copied
from rosebatch.io.read_ahead import grouped, read_ahead
from rosebatch.io.result_names import (
    EMBEDDING_FIELDS,
    RESULT_FIELDS,
    collision_message,
    collisions,
    in_order,
    reserved_names,
)
from rosebatch.io.seen_ids import SeenIds
from rosebatch.io.tables import open_table, table_rows
from rosebatch.io.unread import MAGIC_BYTES, kind_of, require_lines
from rosebatch.pooling_params import PoolingParams

# Lines of a file that may be looked at to recognize an OpenAI batch.
_MOST_PEEKED = 100
_LISTS = (pa.ListType, pa.LargeListType, pa.FixedSizeListType)
# The names of a line's fields. The values are only skipped.
_NAMES = msgspec.json.Decoder(dict[str, msgspec.Raw])
_BOM = b"\xef\xbb\xbf"
_SIZE = attrgetter("size")
# Rows that are read together. Of files, more: a large group takes less time for each row.
_GROUP, _LARGE_GROUP = 64, 256


class PromptReader:
    """The rows of an input. Rows that repeat an id fail.

    Args:
        source: a path or URL of a file, a folder or a glob of files of one kind, or ``-`` for stdin. Other pipes are
            copied to a temporary file, and are like files from then on.
        defaults: sampling fields for what a line does not say.
        input_format: ``auto`` recognizes an OpenAI batch by the first line that is JSON.
        result_column: the one field of a result beside the carried ones, see ``rosebatch.io.result_names``.
        pooling: of a job that embeds, see ``RowParser``.

    Raises:
        FlagError: Parquet from stdin.
        UserError: a file is missing or unreadable, or Parquet files differ in their columns.
    """

    def __init__(
        self,
        source: str,
        defaults: Mapping[str, Any],
        input_format: InputFormat = "auto",
        result_column: str | None = None,
        pooling: PoolingParams | None = None,
    ) -> None:
        self.source = as_path(source)
        self.defaults = defaults
        self.result_column = result_column
        self.pooling = pooling
        # The fields of a result that are not carried.
        self.result_names = RESULT_FIELDS if pooling is None else EMBEDDING_FIELDS
        # Whether a row is served; others count for numbers and ids only.
        self.serves: Callable[[int], bool] | None = None
        self.paths = find_files(self.source)
        self.is_parquet = is_parquet(self.paths[0]) if input_format == "auto" else input_format == "parquet"
        self.columns: pa.Schema | None = None
        self._num_rows = 0
        # The state of each file when it was hashed, and the hash.
        self._digested: tuple[list[FileState] | None, str] | None = None
        self.input_format = input_format
        self._copied: dict[str, Copied] = {}
        # Lines of stdin that were looked at before reading began.
        self._peeked: list[bytes] = []
        if self.is_parquet:
            if source == "-":
                raise FlagError("--input-format parquet needs an input file: Parquet cannot be read from stdin")
            for path in self.paths:
                with self._table(path) as file:
                    self._num_rows += file.metadata.num_rows
                    if self.columns is None:
                        self.columns = file.schema_arrow
                    elif not self.columns.equals(file.schema_arrow):
                        raise UserError(f"{path}: its columns differ from those of {self.paths[0]}")
        elif source != "-":
            by_name = input_format == "auto"
            require_lines({path: kind_of(path, self._head(path), by_name=by_name) for path in self.paths})

    @cached_property
    def is_batch(self) -> bool:
        """Whether the lines are requests of an OpenAI batch. On stdin this waits for the first line."""
        if self.input_format == "auto" and not self.is_parquet:
            return self._looks_like_a_batch()
        return self.input_format == "openai"

    @property
    def may_be_batch(self) -> bool:
        """The same, without waiting: True for a stdin that may still turn out to be none."""
        return (self.source == "-" and self.input_format == "auto") or self.is_batch

    @property
    def can_move(self) -> bool:
        """Whether another process can read the same: neither stdin nor another pipe, which can be read once."""
        return self.source != "-" and all(is_url(path) or not is_stream(path) for path in self.paths)

    def count(self) -> int | None:
        """The number of rows; None for stdin, and for JSONL at a URL, which would be fetched twice."""
        if self.is_parquet:
            return self._num_rows
        if self.source == "-" or is_url(self.source):
            return None
        count = 0
        for path in self.paths:
            with self._open(path) as file:
                count += sum(1 for line in _lines(file, path) if _stripped(line))
        return count

    def require_free_names(self) -> None:
        """Check that results overwrite no field of the input.

        This reads files once more. Rows of stdin, and of JSONL at a URL, can be read once only: each that has such a
        field fails by itself.

        Raises:
            FlagError: they would. All names are in the message.
        """
        found: dict[str, str] = {}
        if self.columns is not None:
            types: dict[str, Any] = {
                field.name: [] if isinstance(field.type, _LISTS) else None for field in self.columns
            }
            found = dict.fromkeys(collisions(types, self.result_column, self.result_names), self.paths[0])
        elif self.source != "-" and not is_url(self.source) and not self.is_batch:
            for where, names in self._collisions():
                found = dict.fromkeys(names, where) | found
        if found:
            names = in_order(found)
            where = found[names[0]]
            place = self.source if where == self.paths[0] else f"{self.source}, {where}"
            raise FlagError(f"{place}: {collision_message(names, self.result_column)}")

    def _collisions(self) -> Iterator[tuple[str, list[str]]]:
        """Place and names of each line that has fields of a result. Broken lines have none; they fail by themselves."""
        reserved = reserved_names(self.result_column, self.result_names)
        for path in self.paths:
            with self._open(path) as file:
                for number, line in enumerate(_lines(file, path), start=1):
                    try:
                        if reserved.isdisjoint(_NAMES.decode(line.removeprefix(_BOM))):
                            continue
                        values = msgspec.json.decode(line.removeprefix(_BOM))
                    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                        continue
                    if names := collisions(values, self.result_column, self.result_names):
                        yield f"{self._where(path, 'line')}{number}", names

    def __iter__(self) -> Iterator[Row]:
        """Rows in input order. Raises UserError if the input cannot be read."""
        return self._rows(self._records(), 1)

    def rows(self, check: Callable[[], None]) -> Iterator[Row]:
        """The same, read ahead on a thread. ``check`` is called while waiting for input."""
        return self._rows(read_ahead(self._records(), check, _SIZE), _GROUP)

    def carried(self) -> Iterator[Mapping[str, Any]]:
        """The fields of each row that its result takes over. Reads the input again, so not from stdin."""
        for record in self._records():
            yield self.parser.parse(record).metadata

    def records(self) -> Iterator[list[Record]]:
        """Groups of rows in input order as they are read, to be parsed elsewhere by ``parser``."""
        return self._identified(self._records(), _GROUP if self.source == "-" else _LARGE_GROUP)

    @property
    def parser(self) -> RowParser:
        """How records become rows. On stdin this waits for the first line."""
        return RowParser(self.is_batch, self.is_parquet, self.defaults, self.result_column, self.pooling)

    def _identified(self, records: Iterator[Record], most: int) -> Iterator[list[Record]]:
        """The rows to serve, in groups of at most so many. Those that repeat an id are marked."""
        seen, parser, serves = SeenIds(), self.parser, self.serves
        for group in grouped(records, _SIZE, most):
            identities = parser.identities([record.content for record in group])
            for place in seen.repeated(identities):
                group[place] = replace(group[place], repeated=identities[place])
            if serves is not None:
                group = [record for record in group if serves(record.number)]
            if group:
                yield group

    def _rows(self, records: Iterator[Record], most: int) -> Iterator[Row]:
        return map(self.parser.parse, chain.from_iterable(self._identified(records, most)))

    def digest(self) -> str:
        """SHA-256 of the files' contents, as ``require_unchanged`` will compare it."""
        states = self._states()
        settled = states is not None and all(state.settled for state in states)
        self._digested = states if settled else None, digest(self.paths, self._open)
        return self._digested[1]

    def require_unchanged(self) -> None:
        """Check that the files still have the contents of ``digest``. Without that call, do nothing.

        Local files are read only if their inode, size or times say that they may have changed.

        Raises:
            UserError: they have others, or cannot be read.
        """
        if self._digested is None:
            return
        states, before = self._digested
        if (states is None or states != self._states()) and digest(self.paths, self._open) != before:
            raise UserError(
                f"{self.source}: changed during the run, so results may be of two inputs; its rows are kept: "
                "put the old input back and rerun with --resume, or accept them with --force-resume"
            )

    def _states(self) -> list[FileState] | None:
        """The state of each file; None if one is at a URL or missing."""
        if any(is_url(path) for path in self.paths):
            return None
        try:
            return [FileState.of(Path(as_path(path))) for path in self.paths]
        except OSError:
            return None

    def _looks_like_a_batch(self) -> bool:
        """Decide by the first line that is JSON, among the first few of each file. Lines of stdin are kept."""
        for path in self.paths:
            file = self._open(path)
            try:
                for line in islice(_lines(file, path), _MOST_PEEKED):
                    if self.source == "-":
                        require_lines({} if self._peeked else {"stdin": kind_of("", line, by_name=False)})
                        self._peeked.append(line)
                    try:
                        return is_request(msgspec.json.decode(_stripped(line)))
                    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                        continue
            finally:
                if self.source != "-":
                    file.close()
        return False

    def _open(self, path: str) -> IO[bytes]:
        if self.source == "-":
            return sys.stdin.buffer
        if path not in self._copied:
            if is_url(path) or not is_stream(path):
                return open_file(path)
            self._copied[path] = Copied(path)
        return self._copied[path].open()

    def _head(self, path: str) -> bytes:
        """The first bytes of a file; none of a URL, which would cost a request."""
        if is_url(path):
            return b""
        with self._open(path) as file:
            try:
                return file.read(MAGIC_BYTES)
            except OSError as error:
                raise UserError(f"{path}: {error.strerror or error}") from None

    @contextmanager
    def _table(self, path: str) -> Iterator[pq.ParquetFile]:
        with self._open(path) as raw, open_table(raw, path) as file:
            yield file

    def _where(self, path: str, what: str) -> str:
        """Names the place of a row, followed by its number."""
        return f"{what} " if len(self.paths) == 1 else f"{printable(path)} {what} "

    def _records(self) -> Iterator[Record]:
        return self._table_rows() if self.is_parquet else self._json_lines()

    def _json_lines(self) -> Iterator[Record]:
        # Decide this first: on stdin it takes the first lines.
        _ = self.is_batch
        index = 0
        for path in self.paths:
            where = self._where(path, "line")
            with self._open(path) as file:
                for number, line in enumerate(chain(self._peeked, _lines(file, path)), start=1):
                    if text := _stripped(line):
                        yield Record(index, f"{where}{number}", text, len(text))
                        index += 1

    def _table_rows(self) -> Iterator[Record]:
        index = 0
        for path in self.paths:
            where = self._where(path, "row")
            with self._table(path) as file:
                for number, (values, size) in enumerate(table_rows(file), start=1):
                    yield Record(index, f"{where}{number}", values, size)
                    index += 1


def _lines(file: IO[bytes], path: str) -> Iterator[bytes]:
    try:
        # Not ``yield from``: that would close the file together with this generator.
        for line in file:  # noqa: UP028
            yield line
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from None


def _stripped(line: bytes) -> bytes:
    """A line without byte order mark and surrounding white space; empty for a blank line."""
    return line.removeprefix(_BOM).strip()
