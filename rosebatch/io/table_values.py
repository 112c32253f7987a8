"""Rows of a table as Python values. A value that Python cannot hold fails its row only."""

import operator
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from typing import Any, NamedTuple

import pyarrow as pa

from rosebatch.core.errors import RowError
from rosebatch.io.arrow_types import changed, has, inner_types

# Years past 9999, texts that are not UTF-8, numbers out of range, decimals of a scale that Python's have not.
_UNREADABLE = (ValueError, ArithmeticError, pa.ArrowException)
_REFERRING = (pa.DictionaryType, pa.RunEndEncodedType, pa.BaseExtensionType)


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
        if _has_union(column.type):
            for row, scalar in zip(rows, column, strict=True):
                row[name] = _value(scalar)
        elif (change := _change(column)) is not None:
            for row in rows:
                row[name] = None if row[name] is None else change(row[name])
    return rows


def _as_plain(array: pa.Array) -> pa.Array:
    if _is_bounded(array.type):
        _require_bounded(array)
    plain = _plain(array.type)
    return array if plain == array.type else pa.array(_Retyped(array, plain))


class _Retyped(NamedTuple):
    """The memory of an array as one of a type with the same layout. No cast: Arrow has none of many nested types."""

    array: pa.Array
    type: pa.DataType

    def __arrow_c_array__(self, requested_schema: object = None) -> tuple[object, object]:
        return self.type.__arrow_c_schema__(), self.array.__arrow_c_array__()[1]


@cache
def _plain(kind: pa.DataType) -> pa.DataType:
    """A type with integers in place of nanoseconds, and the storage of extensions that is nested."""
    return changed(kind, _plain_itself)


def _plain_itself(kind: pa.DataType) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        return kind.storage_type if inner_types(kind.storage_type) else kind
    if kind in (pa.time64("ns"), pa.duration("ns")) or (pa.types.is_timestamp(kind) and kind.unit == "ns"):
        return pa.int64()
    return kind


@cache
def _is_bounded(kind: pa.DataType) -> bool:
    """Whether PyArrow makes other values of those that a type has not, or none: of hour 24 it makes 0."""
    return has(pa.types.is_time, kind) or has(pa.types.is_decimal, kind)


def _require_bounded(array: pa.Array) -> None:
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        if len(array) > 1:
            raise
        # Its lists may hold values of other rows.
        array.take(pa.array([0])).validate(full=True)


@cache
def _has_union(kind: pa.DataType) -> bool:
    return has(pa.types.is_union, kind)


def _value(scalar: pa.Scalar) -> Any:
    """What rows have for it. Of a union's values, only scalars tell their types."""
    if not scalar.is_valid:
        return None
    if isinstance(scalar, pa.UnionScalar | pa.DictionaryScalar | pa.RunEndEncodedScalar):
        return _value(scalar.value)
    if isinstance(scalar, pa.MapScalar):
        keys, items = (_values(scalar.values.field(number)) for number in range(2))
        return _mapping(None, None, list(zip(keys, items, strict=True)))
    if isinstance(scalar, pa.ListScalar):
        return _values(scalar.values)
    if isinstance(scalar, pa.StructScalar):
        fields = {name: _value(each) for name, each in scalar.items()}
        if len(fields) != scalar.type.num_fields:
            raise ValueError("an object has one key twice")
        return {name: each for name, each in fields.items() if each is not None}
    change = _change_of_leaf(scalar.type)
    return scalar.as_py() if change is None else change(scalar.as_py())


def _values(array: pa.Array) -> list[Any]:
    return [row[""] for row in _rows(pa.record_batch([array], [""]))]


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
        return partial(_mapping, _change(array.keys), _change(array.items))
    if pa.types.is_dictionary(kind):
        return _change(array.dictionary)
    if pa.types.is_run_end_encoded(kind):
        return _change(array.values)
    if pa.types.is_nested(kind) and kind.num_fields == 1:
        # Without a copy: values that no row has may ask for a change, which then changes nothing.
        inner = _change(array.values)
        return inner and partial(_list, inner)
    return _change_of_leaf(kind)


def _change_of_leaf(kind: pa.DataType) -> Callable[[Any], Any] | None:
    if isinstance(kind, pa.BaseExtensionType):
        return _change_of_leaf(kind.storage_type)
    if pa.types.is_interval(kind):
        # Their own type is a tuple too, but cannot be pickled.
        return tuple
    if pa.types.is_float16(kind):
        # Older versions of PyArrow make numpy's, whose text has three digits.
        return float
    return _in_whole_minutes if pa.types.is_timestamp(kind) and kind.tz else None


def _in_whole_minutes(moment: datetime) -> datetime:
    """JSON has no zones with seconds, as they were before 1972: the same moment is in UTC."""
    offset = moment.utcoffset()
    return moment.astimezone(UTC) if offset is not None and offset.seconds % 60 else moment


def _may_be_null(array: pa.Array) -> bool:
    """Also where the nulls are in what an array refers to."""
    return array.null_count > 0 or isinstance(array.type, _REFERRING)


def _object(changes: dict[str, Callable[[Any], Any] | None], value: dict[str, Any]) -> dict[str, Any]:
    return {
        name: each if (change := changes[name]) is None else change(each)
        for name, each in value.items()
        if each is not None
    }


def _mapping(
    of_key: Callable[[Any], Any] | None, change: Callable[[Any], Any] | None, items: list[tuple[Any, Any]]
) -> dict[Any, Any]:
    if of_key is not None:
        items = [(of_key(key), each) for key, each in items]
    try:
        found = {key: each if change is None or each is None else change(each) for key, each in items}
    except TypeError:
        raise ValueError("a map has a key that is a list or an object") from None
    if len(found) != len(items):
        raise ValueError("a map has one key twice")
    return found


def _list(change: Callable[[Any], Any], values: list[Any]) -> list[Any]:
    return [None if each is None else change(each) for each in values]
