"""What a reader has read -> rows. A record can be parsed in another process than the one that reads."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
from msgspec.structs import replace

from rosebatch.core.errors import RowError, unexpected
from rosebatch.host.memory import give_back
from rosebatch.io.columns import Columns, as_in_json, from_text, written
from rosebatch.io.depth import DEEPEST, is_deeper
from rosebatch.io.json_hints import hint
from rosebatch.io.json_nesting import depth
from rosebatch.io.large_rows import LARGE_ROW, compact
from rosebatch.io.openai.lines import parse_request
from rosebatch.io.repeated_names import repeated_names
from rosebatch.io.result_names import reserved_names
from rosebatch.io.rewritten_json import rewritten
from rosebatch.io.rows import FailedRow, Row
from rosebatch.io.table_values import BadValues, TextValues
from rosebatch.io.tasks.generate import GENERATE
from rosebatch.io.tasks.task import Task

# A line of JSON, or the values of a table's row. A table's row keeps all of its columns.
Content = bytes | dict[str, Any] | TextValues | BadValues


class Record(msgspec.Struct, frozen=True, gc=False):
    """A row as it is read.

    Attributes:
        number: counted from 0, blank lines left out.
        where: its place, for messages.
        content: unchecked.
        size: bytes.
        repeated: the id, if an earlier row has it.
        place: bytes of its file before it; None if it cannot be read again there.
    """

    number: int
    where: str
    content: Content
    size: int
    repeated: str | int | None = None
    place: int | None = None


class _PlainId(msgspec.Struct):
    id: Any = None


class _BatchId(msgspec.Struct):
    custom_id: Any = None


# Rows that a run searches for names that they have twice. What writes such rows mostly writes nothing else.
_SEARCHED, _SEARCHED_BYTES = 64, 1 << 16
# A row whose fields have fewer bytes on average, on all levels, is decoded at once.
_SMALL_FIELD = 64
# Of large rows: after so many, what was freed of them goes back to the system.
_GIVEN_BACK_BYTES = 16 << 20
_ID_TYPES = frozenset({str, int})
_LINES = {bytes}
_OWN_NAMES = Columns()
_PLAIN_ID, _BATCH_ID = msgspec.json.Decoder(_PlainId), msgspec.json.Decoder(_BatchId)
_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


def _with_repeated_names(row: Row, content: Content) -> Row:
    names = repeated_names(content) if isinstance(content, bytes) else ()
    return replace(row, unclear=(*row.unclear, *(f"{name} (twice)" for name in names))) if names else row


def _no_row(index: int, where: str, error: RowError) -> FailedRow:
    """Of what cannot be read at all: no field is known."""
    return FailedRow(index=index, where=where, metadata={}, error=error)


def _id(found: Any) -> str | int | None:
    """An id, if it is one. 4.0 is 4, as in every field of integers."""
    if type(found) in _ID_TYPES:
        return found  # type: ignore[no-any-return]
    if isinstance(found, float) and found.is_integer():
        return int(found)
    found = written(found)
    return found if isinstance(found, str | int) and not isinstance(found, bool) else None


@dataclass(slots=True)
class RowParser:
    """How the records of one input become rows.

    Attributes:
        is_batch: whether lines are requests of an OpenAI batch.
        defaults: sampling fields for what a row does not say.
        result_column: the one field of a result next to the carried ones, see ``rosebatch.io.result_names``.
        columns: what the names of columns or fields mean.
        task: what the job makes of each row.
        looks_closely: whether all rows are searched for names that they have twice, and not only the first ones.
    """

    is_batch: bool
    defaults: Mapping[str, Any]
    result_column: str | None = None
    columns: Columns = _OWN_NAMES
    task: Task = GENERATE
    looks_closely: bool = False
    _is_plain: bool = field(init=False)
    _id_name: str = field(init=False)
    _asked: frozenset[str] = field(init=False)
    _own: frozenset[str] = field(init=False)
    _named: frozenset[str] = field(init=False)
    # Bytes of large rows since memory was given back.
    _parsed: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._is_plain = self.columns == _OWN_NAMES
        self._id_name = self.columns.id or "id"
        self._asked = self.task.request_fields | {"id"}
        self._own = reserved_names(None, self.task.result_fields)
        self._named = self.columns.named

    def needs(self, name: str) -> bool:
        """Whether a column of a table is read at all."""
        return self.columns.needs(name, self._asked)

    def identity(self, content: Content) -> str | int | None:
        """The id of a row that may otherwise be bad; None if it has none, or one of another type."""
        found: Any = None
        if isinstance(content, bytes):
            try:
                found = self._id_of(content)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return None
        else:
            values = content if isinstance(content, dict) else content.values
            found = values.get(self._id_name)
        return _id(found)

    def identities(self, contents: Sequence[Content]) -> list[str | int | None]:
        """The id of each row."""
        if self.columns.id is not None or set(map(type, contents)) != _LINES:
            return [self.identity(content) for content in contents]
        lines = cast(Sequence[bytes], contents)
        try:
            if self.is_batch:
                found = [_BATCH_ID.decode(line).custom_id for line in lines]
            else:
                found = [_PLAIN_ID.decode(line).id for line in lines]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return [self.identity(line) for line in lines]
        return found if _ID_TYPES.issuperset(map(type, found)) else list(map(_id, found))

    def _id_of(self, line: bytes) -> Any:
        if self.is_batch:
            return _BATCH_ID.decode(line).custom_id
        if self.columns.id is None:
            return _PLAIN_ID.decode(line).id
        raw = _FIELDS.decode(line).get(self.columns.id)
        return None if raw is None else msgspec.json.decode(raw)

    def parse(self, record: Record) -> Row | FailedRow:
        """The row; a failed one if it cannot be served or repeats an id."""
        row = self._read(record, compacts=record.size > LARGE_ROW and not self.is_batch)
        if isinstance(row, FailedRow):
            return row
        if self.looks_closely or (record.number < _SEARCHED and record.size <= _SEARCHED_BYTES):
            row = _with_repeated_names(row, record.content)
        if record.repeated is None:
            return row
        return row.failed(RowError("duplicate_id", f"id {record.repeated!r} was used by an earlier row"))

    def carried(self, record: Record) -> Mapping[str, Any]:
        """The fields that the result of a row takes over, as values: a table has them with their types."""
        return self._read(record).metadata

    def _read(self, record: Record, *, compacts: bool = False) -> Row | FailedRow:
        if record.size > LARGE_ROW:
            self._make_room(record.size)
        try:
            row = self.task.with_defaults(self._row(record))
            return compact(row) if compacts else row
        except Exception as error:
            return _no_row(record.number, record.where, unexpected("reading the row", error))

    def _make_room(self, size: int) -> None:
        self._parsed += size
        if self._parsed >= _GIVEN_BACK_BYTES:
            self._parsed = 0
            give_back()

    def _row(self, record: Record) -> Row | FailedRow:
        index, where, content = record.number, record.where, record.content
        if isinstance(content, bytes):
            return self._json_row(content, index, where)
        if isinstance(content, BadValues):
            # As carried as it would be without the error.
            return FailedRow(index=index, where=where, metadata=self._carried(content.values), error=content.error)
        if isinstance(content, TextValues):
            values = content.values
            try:
                request = from_text(values)
            except RowError as error:
                return FailedRow(index=index, where=where, metadata=self._carried(values), error=error)
        else:
            values, request = content, as_in_json(content)
        if self._is_plain and request is values:
            return self._plain_row(values, index, where, is_table=True)
        return self._renamed_row(values, request, index, where)

    def _json_row(self, content: bytes, index: int, where: str) -> Row | FailedRow:
        is_large = len(content) > LARGE_ROW
        try:
            values = self._large_values(content) if is_large else msgspec.json.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return _no_row(index, where, RowError("invalid_json", f"not valid JSON: {error}{hint(content)}"))
        if (
            len(content) > DEEPEST
            and content.count(b"[") + content.count(b"{") > DEEPEST
            and (depth(content) > DEEPEST if is_large else is_deeper(values))
        ):
            return _no_row(index, where, RowError("invalid_json", f"nested more than {DEEPEST} levels deep"))
        if self.is_batch:
            return parse_request(values, index=index, where=where, defaults=self.defaults)
        if not isinstance(values, dict):
            what = f"expected a JSON object, got {type(values).__name__}"
            return _no_row(index, where, RowError("invalid_line", what))
        if self._is_plain:
            return self._plain_row(values, index, where, is_table=False)
        return self._renamed_row(values, values, index, where, is_table=False)

    def _large_values(self, line: bytes) -> Any:
        """The line, where carried lists and objects are the JSON that the result will have."""
        if self._is_plain and not self.is_batch and line.count(b":") * _SMALL_FIELD < len(line):
            with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return {name: self._large_value(name, bytes(field)) for name, field in _FIELDS.decode(line).items()}
        # It is read as it is, or is no row: then the error has its place in the line.
        return msgspec.json.decode(line)

    def _large_value(self, name: str, field: bytes) -> Any:
        is_carried = name not in self._asked and name not in self._own and field.startswith((b"[", b"{"))
        return msgspec.Raw(rewritten(field)) if is_carried else msgspec.json.decode(field)

    def _renamed_row(
        self, values: dict[str, Any], request: dict[str, Any], index: int, where: str, *, is_table: bool = True
    ) -> Row | FailedRow:
        """A row whose columns have other names or types than a request's.

        Args:
            values: what its result carries.
            request: the same as a request has it.
            index, where: its place.
            is_table: whether all columns are carried.
        """
        carried = self._carried(values, is_table=is_table)
        try:
            made = self.columns.made_prompt(values)
            if made is not None and self.columns.keeps_prompt:
                carried["prompt"] = made
            request = self.columns.request(
                request, self._asked, made, is_table=is_table, prompts=self.task.prompt_fields
            )
        except RowError as error:
            return FailedRow(index=index, where=where, metadata=carried, error=error)
        row = self._plain_row(as_in_json(request) if is_table else request, index, where, is_table=is_table)
        if isinstance(row, Row) and row.unclear:
            row = replace(row, unclear=tuple(name for name in row.unclear if name not in self._named))
        return replace(row, metadata=carried)

    def _carried(self, values: dict[str, Any], *, is_table: bool = True) -> dict[str, Any]:
        columns = self.columns
        if columns.carried is None:
            kept = {name: values[name] for name in values if columns.carries(name, is_table=is_table)}
            found = self.task.carried(kept, is_table, self.result_column)
        else:
            own = self.task.result_fields if self.result_column is None else (self.result_column,)
            found = {name: values[name] for name in columns.carried if name in values and name not in own}
        if columns.keeps_prompt and not columns.makes_prompt:
            names = self.task.prompt_fields if columns.prompt is None else (columns.prompt,)
            found = {**{name: values[name] for name in names if name in values}, **found}
        return found

    def _plain_row(self, values: dict[str, Any], index: int, where: str, *, is_table: bool) -> Row | FailedRow:
        return self.task.parse(
            values,
            index=index,
            where=where,
            defaults=self.defaults,
            keep_prompt=is_table,
            result_column=self.result_column,
        )
