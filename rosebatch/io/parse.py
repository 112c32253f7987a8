"""What a reader has read -> rows. A record can be parsed in another process than the one that reads."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import msgspec

from rosebatch.errors import RowError, unexpected
from rosebatch.io.cells import BadCells
from rosebatch.io.depth import is_deeper
from rosebatch.io.embeddings import parse_embedding_row
from rosebatch.io.openai.lines import parse_request
from rosebatch.io.rows import FailedRow, PromptRow, parse_row
from rosebatch.pooling_params import PoolingParams

Row = PromptRow | FailedRow
# A line of JSON, or the values of a table's row.
Content = bytes | dict[str, Any] | BadCells
# Levels of lists and objects in a line. Python's own limit, near 1000, depends on where a line is read or written.
_DEEPEST = 600


class Record(msgspec.Struct, frozen=True, gc=False):
    """A row as it is read.

    Attributes:
        number: counted from 0, blank lines left out.
        where: its place, for messages.
        content: unchecked.
        size: bytes.
        repeated: the id, if an earlier row has it.
    """

    number: int
    where: str
    content: Content
    size: int
    repeated: str | int | None = None


class _PlainId(msgspec.Struct):
    id: Any = None


class _BatchId(msgspec.Struct):
    custom_id: Any = None


_ID_TYPES = frozenset({str, int})
_PLAIN_ID, _BATCH_ID = msgspec.json.Decoder(_PlainId), msgspec.json.Decoder(_BatchId)


@dataclass(slots=True)
class RowParser:
    """How the records of one input become rows.

    Attributes:
        is_batch: whether lines are requests of an OpenAI batch.
        is_table: whether rows keep all of their columns.
        defaults: sampling fields for what a row does not say.
        result_column: the one field of a result beside the carried ones, see ``rosebatch.io.result_names``.
        pooling: of a job that embeds: for what a row does not say. None: rows are completed.
    """

    is_batch: bool
    is_table: bool
    defaults: Mapping[str, Any]
    result_column: str | None = None
    pooling: PoolingParams | None = None

    def identity(self, content: Content) -> str | int | None:
        """The id of a row that may otherwise be bad; None if it has none, or one of another type."""
        found: Any = None
        if isinstance(content, bytes):
            try:
                found = _BATCH_ID.decode(content).custom_id if self.is_batch else _PLAIN_ID.decode(content).id
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
                return None
        else:
            found = (content.values if isinstance(content, BadCells) else content).get("id")
        return found if isinstance(found, str | int) and not isinstance(found, bool) else None

    def identities(self, contents: Sequence[Content]) -> list[str | int | None]:
        """The id of each row."""
        if self.is_table:
            return [self.identity(content) for content in contents]
        lines = cast(Sequence[bytes], contents)
        try:
            if self.is_batch:
                found = [_BATCH_ID.decode(line).custom_id for line in lines]
            else:
                found = [_PLAIN_ID.decode(line).id for line in lines]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return [self.identity(line) for line in lines]
        return [each if type(each) in _ID_TYPES else None for each in found]

    def parse(self, record: Record) -> Row:
        """The row; a failed one if it cannot be served or repeats an id."""
        try:
            row = self._with_pooling(self._row(record))
        except Exception as error:
            failure = unexpected("reading the row", error)
            return FailedRow(index=record.number, where=record.where, metadata={}, error=failure)
        if record.repeated is None or isinstance(row, FailedRow):
            return row
        failure = RowError("duplicate_id", f"id {record.repeated!r} was used by an earlier row")
        return FailedRow(index=row.index, where=row.where, metadata=row.metadata, error=failure)

    def _row(self, record: Record) -> Row:
        index, where, content = record.number, record.where, record.content
        if isinstance(content, BadCells):
            # As carried as it would be without the error.
            found = self._plain_row(content.values, index, where)
            return FailedRow(index=index, where=where, metadata=found.metadata, error=content.error)
        if not isinstance(content, bytes):
            return self._plain_row(content, index, where)
        try:
            values = msgspec.json.decode(content)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            failure = RowError("invalid_json", f"not valid JSON: {error}")
            return FailedRow(index=index, where=where, metadata={}, error=failure)
        if (
            len(content) > _DEEPEST
            and content.count(b"[") + content.count(b"{") > _DEEPEST
            and is_deeper(values, _DEEPEST)
        ):
            failure = RowError("invalid_json", f"nested more than {_DEEPEST} levels deep")
            return FailedRow(index=index, where=where, metadata={}, error=failure)
        if self.is_batch:
            return parse_request(values, index=index, where=where, defaults=self.defaults)
        return self._plain_row(values, index, where)

    def _with_pooling(self, row: Row) -> Row:
        if isinstance(row, FailedRow) or row.pooling is None or self.pooling is None:
            return row
        return replace(row, pooling=row.pooling.over(self.pooling))

    def _plain_row(self, values: object, index: int, where: str) -> Row:
        if self.pooling is not None:
            return parse_embedding_row(
                values, index=index, where=where, keep_prompt=self.is_table, result_column=self.result_column
            )
        return parse_row(
            values,
            index=index,
            where=where,
            defaults=self.defaults,
            keep_prompt=self.is_table,
            result_column=self.result_column,
        )
