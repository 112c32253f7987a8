"""Files of prompts -> rows: JSONL of rosebatch's own fields or of an OpenAI batch, and tables."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace as with_fields
from functools import cached_property
from itertools import chain, islice
from operator import attrgetter
from typing import Any

import pyarrow as pa
from msgspec import MsgspecError
from msgspec.structs import replace

from rosebatch.config.run import InputFormat
from rosebatch.core.errors import FlagError, printable
from rosebatch.io.beginnings import Beginnings, values_of
from rosebatch.io.columns import Columns
from rosebatch.io.contents import Contents
from rosebatch.io.field_order import reordered
from rosebatch.io.files import as_path, is_url
from rosebatch.io.formats import JSON_KINDS, TABLES, Kind
from rosebatch.io.free_names import TakenNames
from rosebatch.io.hive import Partitions, row_with_keys, text_with_keys, with_columns
from rosebatch.io.image_files import ROWS_OF_FILES, image_root, image_rows
from rosebatch.io.images.pdf import require_pdfium
from rosebatch.io.images.policy import NO_MEDIA, MediaPolicy
from rosebatch.io.input_files import InputFiles
from rosebatch.io.json_texts import stripped
from rosebatch.io.parse import Content, Record, RowParser
from rosebatch.io.read_again import ReadAgain
from rosebatch.io.read_ahead import GROUP_BYTES, grouped, read_ahead
from rosebatch.io.rows import FailedRow, Row
from rosebatch.io.schemas import joined, kept_metadata
from rosebatch.io.seen_ids import SeenIds
from rosebatch.io.table_values import BadValues
from rosebatch.io.tables import open_table
from rosebatch.io.tasks.generate import GENERATE
from rosebatch.io.tasks.task import Task
from rosebatch.io.whole_order import in_whole_order

# Four times what a prompt may have: JSON may write a byte of text as three.
MAX_ROW_BYTES = 32 << 20
_SIZE = attrgetter("size")
# Rows that are read together. Of files, more: a large group takes less time for each row.
_GROUP, _LARGE_GROUP = 64, 256
# Rows, and their bytes, that are looked at to choose the order of a template's fields.
_FIRST_ROWS, _FIRST_BYTES = 10_000, 64 << 20


class PromptReader:
    """The rows of an input. Rows that repeat an id fail.

    Args:
        source: a path or URL of a file, a folder or a glob, or ``-`` for stdin. Other pipes are copied to a temporary
            file, and are like files from then on; so is a stdin that is compressed or a table.
        defaults: sampling fields for what a line does not say.
        input_format: ``auto`` goes by extensions and first bytes, and recognizes an OpenAI batch by the first line
            that is JSON.
        result_column: the one field of a result next to the carried ones, see ``rosebatch.io.result_names``.
        columns: what the names of columns or fields mean.
        task: what the job makes of each row.
        max_row_bytes: a longer row fails before it is parsed, and is read past.
        media: where images may come from; whoever serves the rows heeds it. Where each file is an image, these are
            below the media root.

    Raises:
        FlagError: a column that was named is missing.
        UserError: a file is missing or unreadable, or files of one kind of table differ in their columns.
    """

    def __init__(
        self,
        source: str,
        defaults: Mapping[str, Any],
        input_format: InputFormat = "auto",
        result_column: str | None = None,
        columns: Columns | None = None,
        task: Task = GENERATE,
        max_row_bytes: int = MAX_ROW_BYTES,
        media: MediaPolicy = NO_MEDIA,
    ) -> None:
        self.source = as_path(source)
        self.defaults = defaults
        self.max_row_bytes = max_row_bytes
        self.result_column = result_column
        self.columns = columns or Columns()
        self.task = task
        # Whether a row is served; others count for numbers and ids only.
        self.serves: Callable[[int], bool] | None = None
        # Bytes of rows that are sorted together, so that those that begin alike follow each other; 0: input order.
        self.sorts_within = 0
        # See ``RowParser``.
        self.looks_closely = False
        self.input_format = input_format
        # Rows of files with JSON, as far as they were counted.
        self._counts: dict[str, int] = {}
        of_files = self.columns.of_files
        self._files = InputFiles(self.source, of_images=of_files)
        self.media = media.below(image_root(self.source)) if of_files else media
        self._contents = Contents(self._files, input_format, self.columns.prompt, max_row_bytes, of_images=of_files)
        if of_files and "pdf" in self._contents.kinds:
            require_pdfium()
        if self.source != "-":
            _ = self._schemas

    @property
    def paths(self) -> list[str]:
        """The files, in the order of their names."""
        return self._files.paths

    @cached_property
    def _keys(self) -> Partitions:
        """What the names of folders say of each file."""
        return Partitions(self.source, self.paths)

    @cached_property
    def _schemas(self) -> dict[Kind, tuple[pa.Schema, int | None]]:
        """Of each kind of table, the columns and the number of rows, as far as the files say."""
        found: dict[Kind, tuple[pa.Schema, int | None]] = {}
        firsts: dict[Kind, str] = {}
        for path, kind in zip(self.paths, self._contents.kinds, strict=True):
            if kind not in TABLES:
                continue
            with self._files.open(path) as raw, open_table(raw, path, kind, self.max_row_bytes) as table:
                first = firsts.setdefault(kind, path)
                own = with_columns(table.schema, self._keys.schema)
                schema, count = found.get(kind, (own, 0))
                if not schema.equals(own):
                    schema = joined(schema, own, first, path)
                self.columns.require_in(schema.names, path, self.task.prompt_fields)
                found[kind] = schema, None if count is None or table.num_rows is None else count + table.num_rows
        return found

    @property
    def schema(self) -> pa.Schema | None:
        """Names and types of the columns that results may carry; None unless all files are tables of one kind."""
        if len(kinds := set(self._contents.kinds)) != 1 or not kinds.issubset(TABLES):
            return None
        ((schema, _),) = self._schemas.values()
        carried = [field for field in schema if self.columns.carries(field.name, is_table=True)]
        if self.columns.keeps_prompt and self.columns.makes_prompt:
            carried.append(pa.field("prompt", pa.string()))
        left_out = set(schema.names) - {field.name for field in carried}
        return pa.schema(carried, kept_metadata(schema.metadata, left_out))

    @property
    def kind(self) -> InputFormat:
        """What all files hold; ``auto`` for files of several kinds."""
        return self._contents.kind

    @property
    def is_batch(self) -> bool:
        """Whether the lines are requests of an OpenAI batch. On stdin this waits for the first line.

        Raises:
            UserError: there are tables next to the batch.
        """
        return self._contents.is_batch

    @property
    def may_be_batch(self) -> bool:
        """The same, without waiting: True for a stdin that may still turn out to be none."""
        return self._contents.may_be_batch

    @property
    def can_move(self) -> bool:
        """Whether another process can read the same: neither stdin nor another pipe, which can be read once."""
        return self._files.can_move

    def count(self) -> int | None:
        """The number of rows.

        None for stdin, for text at a URL, which would be fetched twice, where a line is read past, and for PDFs.
        """
        if self.source == "-":
            return None
        if self.columns.of_files:
            return None if "pdf" in self._contents.kinds else len(self.paths)
        counts = [count for _, count in self._schemas.values()]
        if not self._contents.json_paths and None not in counts:
            return sum(counts)  # type: ignore[arg-type]
        if is_url(self.source):
            return None
        found = [self._count(path, kind) for path, kind in zip(self.paths, self._contents.kinds, strict=True)]
        return None if None in found else sum(found)  # type: ignore[arg-type]

    def _count(self, path: str, kind: Kind) -> int | None:
        if path in self._counts:
            return self._counts[path]
        if kind in JSON_KINDS:
            return self._count_lines(path, kind)
        with self._files.open(path) as raw, open_table(raw, path, kind, self.max_row_bytes) as table:
            return table.num_rows if table.num_rows is not None else sum(1 for _ in table.rows(lambda name: False))

    @property
    def is_empty(self) -> bool:
        """Whether there is surely no row. On stdin this waits for the first line; URLs are not read for it."""
        if self._contents.has_ended:
            return True
        if is_url(self.source) or not self._files.can_reopen(self.source):
            return False
        if any(count for _, count in self._schemas.values()) or any(self._counts.values()):
            return False
        return next(self._records(), None) is None

    def reorder_fields(self) -> None:
        """Bring the lines of the template into a better order for the first rows, see ``rosebatch.io.field_order``.

        Raises:
            FlagError: there is no template, or none with such lines; or stdin, which is read once, has the rows.
        """
        if self.columns.template is None:
            raise FlagError("--reorder-fields needs a --prompt-template")
        if self.source == "-":
            raise FlagError("--reorder-fields looks at rows before the run: it needs a file, and not stdin")
        self.columns = with_fields(self.columns, template=reordered(self.columns.template, self._first_values()))

    def _first_values(self) -> Iterator[Mapping[str, Any]]:
        size = 0
        for record in islice(self._records(), _FIRST_ROWS):
            size += record.size
            if size > _FIRST_BYTES:
                return
            try:
                values = values_of(record.content)
            except (MsgspecError, UnicodeError, RecursionError):
                continue
            yield values

    def require_free_names(self) -> list[str]:
        """Check that results overwrite no field of the input, and that some row of it may have a prompt.

        This reads files once more. Rows of stdin, of batches, and of JSONL at a URL are not: each that has such a
        field, or no prompt, fails by itself. So do rows after a line that is read past.

        Returns:
            the columns that ``--columns`` and ``--id-column`` name, and no row has, if all rows were read.

        Raises:
            FlagError: they would, or none has. All names are in the message.
        """
        if self.source == "-":
            return []
        taken = TakenNames(self.result_column, self.columns, self.task.result_fields, self.task.prompt_fields)
        if self.columns.of_files:
            taken.add_table(ROWS_OF_FILES, self.source)
            taken.require_none(self.source, self.source)
            return sorted(taken.absent)
        for kind, (schema, _) in self._schemas.items():
            taken.add_table(schema, self.paths[self._contents.kinds.index(kind)])
        reads_all = not is_url(self.source) and not self.is_batch
        for path, kind in self._contents.each(*JSON_KINDS) if reads_all else ():
            if (count := self._count_lines(path, kind, taken)) is None:
                reads_all = False
            else:
                self._counts[path] = count
        taken.require_none(self.source, self.paths[0])
        if reads_all and not self._schemas:
            taken.require_prompts(self.source)
        return sorted(taken.absent) if reads_all and any(self._counts.values()) else []

    def _count_lines(self, path: str, kind: Kind, taken: TakenNames | None = None) -> int | None:
        """The number of a file's lines, which ``taken`` looks at; None if one is read past."""
        where, number = self._where(path, kind), 0
        for number, (place, text, *_) in enumerate(self._json_rows(path, kind), start=1):  # noqa: B007
            if not isinstance(text, bytes):
                return None
            if taken is not None:
                taken.add_line(text, where, place)
        return number

    def __iter__(self) -> Iterator[Row | FailedRow]:
        """Rows in input order, whatever ``sorts_within``. Raises UserError if the input cannot be read."""
        # A pipe may have one row now, and the next one later.
        return self._rows(self._records(), 1 if self.source == "-" else _GROUP)

    def rows(self, check: Callable[[], None]) -> Iterator[Row | FailedRow]:
        """The same, read ahead on a thread. ``check`` is called while waiting for input."""
        if not self._sorts:
            return self._rows(read_ahead(self._records(), check, _SIZE), _GROUP)
        return map(self.parser.parse, read_ahead(chain.from_iterable(self._sorted()), check, _SIZE))

    def carried(self) -> Iterator[tuple[Mapping[str, Any], int]]:
        """The fields that the result of each row takes over, and its bytes. Reads the input again: not from stdin."""
        parser = self.parser
        for record in self._records():
            yield parser.carried(record), record.size

    def records(self) -> Iterator[list[Record]]:
        """Groups of rows as they are read, to be parsed elsewhere by ``parser``."""
        if self._sorts:
            return self._sorted()
        return self._identified(self._records(), _GROUP if self.source == "-" else _LARGE_GROUP)

    @property
    def _sorts(self) -> bool:
        """Whether rows are sorted. Those of a stdin that is read as it comes would have to wait for others."""
        return self.sorts_within > 0 and self._files.can_reopen(self.source)

    def _sorted(self) -> Iterator[list[Record]]:
        beginning = Beginnings(self.is_batch, self.columns)
        with ReadAgain(self._files) as again:
            groups = self._identified(self._records(again), _LARGE_GROUP)
            yield from in_whole_order(groups, beginning, again.with_contents, self.sorts_within)

    @property
    def parser(self) -> RowParser:
        """How records become rows. On stdin this waits for the first line."""
        return RowParser(self.is_batch, self.defaults, self.result_column, self.columns, self.task, self.looks_closely)

    def _identified(self, records: Iterator[Record], limit: int) -> Iterator[list[Record]]:
        """The rows to serve, in groups of at most so many. Those that repeat an id are marked."""
        seen, parser, serves = SeenIds(), self.parser, self.serves
        for group in grouped(records, _SIZE, limit):
            identities = parser.identities([record.content for record in group])
            for place in seen.repeated(identities):
                group[place] = replace(group[place], repeated=identities[place])
            if serves is not None:
                group = [record for record in group if serves(record.number)]
            if group:
                yield group

    def _rows(self, records: Iterator[Record], limit: int) -> Iterator[Row | FailedRow]:
        return map(self.parser.parse, chain.from_iterable(self._identified(records, limit)))

    def digest(self) -> str:
        """SHA-256 of the rows: of the files' contents, as ``require_unchanged`` will compare it, and of their keys.

        Lines of a batch have no keys.
        """
        contents = self._files.digest()
        return contents if self.is_batch else self._keys.digest(contents)

    def require_unchanged(self) -> None:
        """See ``InputFiles.require_unchanged``."""
        self._files.require_unchanged()

    def _where(self, path: str, kind: Kind) -> str:
        """Names the place of a row, followed by its number."""
        if kind == "pdf":
            return f"{printable(path)}#"
        what = "line" if kind == "lines" else "row"
        return f"{what} " if len(self.paths) == 1 else f"{printable(path)} {what} "

    def _records(self, again: ReadAgain | None = None) -> Iterator[Record]:
        # Decide this first: on stdin it takes the first lines.
        _ = self.is_batch
        index = 0
        for path, kind in zip(self.paths, self._contents.kinds, strict=True):
            rows: Iterator[tuple[int, Content, int, int | None]]
            if kind in ("image", "pdf"):
                found = image_rows(path, kind, self.media)
                rows = ((number, row, len(path), None) for number, row in found)
            else:
                rows = self._json_rows(path, kind) if kind in JSON_KINDS else self._table_rows(path, kind)
            where, keys = self._where(path, kind), self._json_keys(path)
            has_places = again is not None and kind == "lines" and again.begin(path, index, keys)
            for number, content, size, place in rows:
                # What has no number is a whole file.
                yield Record(
                    index,
                    f"{where}{number}" if number else printable(path),
                    content,
                    size,
                    None,
                    place if has_places else None,
                )
                del content
                index += 1

    def _json_keys(self, path: str) -> Mapping[str, Any]:
        return {} if self.is_batch else self._keys.of(path)

    def _json_rows(self, path: str, kind: Kind) -> Iterator[tuple[int, bytes | BadValues, int, int | None]]:
        """Of each row its number, text and bytes, and of lines also the place; None behind one that is read past."""
        keys = self._json_keys(path)
        end: int | None = 0
        with self._contents.texts(path, kind) as texts:
            for number, line in enumerate(texts, start=1):
                if not isinstance(line, bytes):
                    end = None
                    # Of this size, it goes on at once, with the rows before it.
                    yield number, line, GROUP_BYTES, None
                    continue
                place, end = end, None if end is None else end + len(line)
                if text := stripped(line):
                    place = None if place is None else place + line.find(text)
                    size, content = len(text), text_with_keys(text, keys) if keys else text
                    # Neither while the row is used, nor while the next line is read.
                    del line, text
                    yield number, content, size, place
                    del content

    def _table_rows(self, path: str, kind: Kind) -> Iterator[tuple[int, Content, int, None]]:
        with self._files.open(path) as raw, open_table(raw, path, kind, self.max_row_bytes) as table:
            keys = {name: value for name, value in self._keys.of(path).items() if name not in table.schema.names}
            for number, (content, size) in enumerate(table.rows(self.parser.needs), start=1):
                yield number, (row_with_keys(content, keys) if keys else content), size, None
