"""Rows of a table as Python values. A value that Python cannot hold fails its row only."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa

from rosebatch.core.errors import RowError

# Years past 9999, texts that are not UTF-8, numbers out of range.
_UNREADABLE = (ValueError, OverflowError, pa.ArrowException)


class BadValues(NamedTuple):
    """A row with values that cannot be read: the others, and the error of the first."""

    values: dict[str, Any]
    error: RowError


class TextValues(NamedTuple):
    """A row whose values are all texts, or None: a CSV file has no types."""

    values: dict[str, Any]


def rows_of(batch: pa.RecordBatch) -> Iterator[dict[str, Any] | BadValues]:
    """The rows of some columns. Nanoseconds are integers: Python's own types stop at microseconds."""
    try:
        yield from _python_types(batch).to_pylist()
    except _UNREADABLE:
        for number in range(batch.num_rows):
            yield _row(batch.slice(number, 1))


def _row(batch: pa.RecordBatch) -> dict[str, Any] | BadValues:
    values, error = {}, None
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            (values[name],) = column.cast(_without_nanoseconds(column.type)).to_pylist()
        except _UNREADABLE as reason:
            error = error or RowError("invalid_value", f"column {name} has a value that cannot be read ({reason})")
    return values if error is None else BadValues(values, error)


def _python_types(batch: pa.RecordBatch) -> pa.RecordBatch:
    columns = [column.cast(_without_nanoseconds(column.type)) for column in batch.columns]
    return pa.RecordBatch.from_arrays(columns, names=batch.schema.names)


def _without_nanoseconds(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(kind):
        return pa.struct([_plain_field(field) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_plain_field(kind.value_field))
    if pa.types.is_large_list(kind):
        return pa.large_list(_plain_field(kind.value_field))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(_plain_field(kind.value_field), kind.list_size)
    if pa.types.is_map(kind):
        return pa.map_(_plain_field(kind.key_field), _plain_field(kind.item_field), kind.keys_sorted)
    if kind in (pa.time64("ns"), pa.duration("ns")) or (pa.types.is_timestamp(kind) and kind.unit == "ns"):
        return pa.int64()
    return kind


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(_without_nanoseconds(field.type))
