"""Rows of a table as Python values. A value that Python cannot hold fails its row only."""

import operator
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import pyarrow as pa

from rosebatch.core.errors import RowError

# Years past 9999, texts that are not UTF-8, numbers out of range, decimals of a scale that Python's have not.
_UNREADABLE = (ValueError, ArithmeticError, pa.ArrowException)
_REFERRING = (pa.DictionaryType, pa.RunEndEncodedType, pa.UnionType, pa.BaseExtensionType)


class BadValues(NamedTuple):
    """A row with values that cannot be read: the others, and the error of the first."""

    values: dict[str, Any]
    error: RowError


class TextValues(NamedTuple):
    """A row whose values are all texts, or None: a CSV file has no types."""

    values: dict[str, Any]


def rows_of(batch: pa.RecordBatch) -> Sequence[dict[str, Any] | BadValues]:
    """The rows of some columns, with the values that JSON has in place of Arrow's.

    A struct has the keys of all rows, so a null in one is a key that the row does not have. A map is an object, whose
    nulls stay. Nanoseconds are integers: Python's own types stop at microseconds.
    """
    try:
        return _rows(batch)
    except _UNREADABLE:
        return [_row(batch.slice(number, 1)) for number in range(batch.num_rows)]


def _row(batch: pa.RecordBatch) -> dict[str, Any] | BadValues:
    values: dict[str, Any] = {}
    error = None
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            values |= _rows(pa.record_batch([column], [name]))[0]
        except _UNREADABLE as reason:
            error = error or RowError("invalid_value", f"column {name} has a value that cannot be read ({reason})")
    return values if error is None else BadValues(values, error)


def _rows(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    names, given = batch.schema.names, batch.columns
    columns = [_as_plain(column) for column in given]
    is_plain = all(map(operator.is_, columns, given))
    rows: list[dict[str, Any]] = (batch if is_plain else pa.record_batch(columns, names)).to_pylist()
    for name, column in zip(names, columns, strict=True):
        if (change := _change(column)) is not None:
            for row in rows:
                row[name] = None if row[name] is None else change(row[name])
    return rows


def _change(array: pa.Array) -> Callable[[Any], Any] | None:
    """What makes Arrow's Python values of an array JSON's. None: they are the same; a struct without nulls is."""
    kind = array.type
    if pa.types.is_struct(kind):
        fields = [array.field(number) for number in range(kind.num_fields)]
        changes = list(map(_change, fields))
        if not any(changes) and not any(map(_may_be_null, fields)):
            return None
        return partial(_object, dict(zip([field.name for field in kind], changes, strict=True)))
    if pa.types.is_map(kind):
        return partial(_mapping, _change(array.items))
    if pa.types.is_dictionary(kind):
        return _change(array.dictionary)
    if pa.types.is_run_end_encoded(kind):
        return _change(array.values)
    if pa.types.is_interval(kind):
        # Their own type is a tuple too, but cannot be pickled.
        return tuple
    if pa.types.is_union(kind):
        return _without_intervals if _has_intervals(kind) else None
    if isinstance(kind, pa.BaseExtensionType):
        return _change(array.storage)
    if pa.types.is_nested(kind) and kind.num_fields == 1:
        # Without a copy: values that no row has may ask for a change, which then changes nothing.
        inner = _change(array.values)
        return inner and partial(_list, inner)
    return None


def _may_be_null(array: pa.Array) -> bool:
    """Also where the nulls are in what an array refers to."""
    return array.null_count > 0 or isinstance(array.type, _REFERRING)


def _object(changes: dict[str, Callable[[Any], Any] | None], value: dict[str, Any]) -> dict[str, Any]:
    return {
        name: each if (change := changes[name]) is None else change(each)
        for name, each in value.items()
        if each is not None
    }


def _mapping(change: Callable[[Any], Any] | None, items: list[tuple[Any, Any]]) -> dict[Any, Any]:
    try:
        found = {key: each if change is None or each is None else change(each) for key, each in items}
    except TypeError:
        raise ValueError("a map has a key that is a list or an object") from None
    if len(found) != len(items):
        raise ValueError("a map has one key twice")
    return found


@cache
def _has_intervals(kind: pa.DataType) -> bool:
    inner = [kind.field(number).type for number in range(kind.num_fields)]
    if pa.types.is_dictionary(kind):
        inner = [kind.value_type]
    if isinstance(kind, pa.BaseExtensionType):
        inner = [kind.storage_type]
    return pa.types.is_interval(kind) or any(map(_has_intervals, inner))


def _without_intervals(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_intervals(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return (tuple if isinstance(value, tuple) else list)(map(_without_intervals, value))
    return value


def _list(change: Callable[[Any], Any], values: list[Any]) -> list[Any]:
    return [None if each is None else change(each) for each in values]


def _as_plain(array: pa.Array) -> pa.Array:
    plain = _plain(array.type)
    return array if plain == array.type else array.cast(plain)


@cache
def _plain(kind: pa.DataType) -> pa.DataType:
    """A type without nanoseconds, and without nulls alone: PyArrow 26 ends the process in casts of their slices."""
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
    return pa.bool_() if pa.types.is_null(kind) else kind


def _plain_field(field: pa.Field) -> pa.Field:
    return field.with_type(_plain(field.type))
