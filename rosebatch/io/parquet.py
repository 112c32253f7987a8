"""Result rows as a Parquet file whose carried columns get the one type that fits all rows."""

from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from rosebatch.io.rows import RESULT_FIELDS

# All rows, from the first, at each call.
Rows = Callable[[], Iterator[dict[str, Any]]]

_CHUNK = 1024
_DEEPEST = 16
_EXACT_IN_FLOAT = 2**53

# Fixed, not inferred: a file without a failed row must have the same types as one with.
_RESULT_TYPES: dict[str, pa.DataType] = {
    "index": pa.int64(),
    "text": pa.string(),
    "finish_reason": pa.string(),
    "usage": pa.struct([(name, pa.int64()) for name in ("prompt_tokens", "completion_tokens")]),
    "token_ids": pa.list_(pa.int64()),
    "error": pa.struct([("code", pa.string()), ("message", pa.string())]),
}


def write_parquet(path: Path, rows: Rows, *, token_ids: bool, columns: pa.Schema | None) -> None:
    """Settle the types in one pass over the rows, write them in another: memory holds a chunk of them.

    Args:
        path: of the file.
        rows: carried fields and results.
        token_ids: whether rows have ``token_ids``.
        columns: types of the carried columns, where the input has them. Without, values that are nested too deep for a
            Parquet reader, or of types that do not go together, become JSON text.
    """
    if columns is None:
        types = _carried_types(rows)
    else:
        types = {field.name: field.type for field in columns if field.name not in RESULT_FIELDS}
    as_json = [name for name, kind in types.items() if kind is None]
    results = {n: t for n, t in _RESULT_TYPES.items() if token_ids or n != "token_ids"}
    # A column without a single value would get Arrow's null type, which other files' rows do not fit.
    carried = [(n, pa.string() if k is None or pa.types.is_null(k) else k) for n, k in types.items()]
    schema = pa.schema([*carried, *results.items()])
    with pq.ParquetWriter(path, schema) as writer:
        for chunk in _chunks(rows):
            for row in chunk:
                if columns is None:
                    _shorten(row)
                row.update({n: _json(row[n]) for n in as_json if row.get(n) is not None})
            writer.write_table(pa.Table.from_pylist(chunk, schema))


def _carried_types(rows: Rows) -> dict[str, pa.DataType | None]:
    """The type of each carried column, None for mixed types, which are written as JSON text."""
    types: dict[str, pa.DataType | None] = {}
    exact: set[str] = set()
    for chunk in _chunks(rows):
        for row in chunk:
            _shorten(row)
        for name in dict.fromkeys(n for row in chunk for n in row if n not in RESULT_FIELDS):
            values = [row.get(name) for row in chunk]
            if any(isinstance(value, int) and abs(value) > _EXACT_IN_FLOAT for value in values):
                exact.add(name)
            inferred = _infer(values)
            unified = _unify(types[name], inferred) if name in types else inferred
            lossy = name in exact and unified is not None and pa.types.is_floating(unified)
            types[name] = None if lossy else unified
    return types


def _shorten(row: dict[str, Any]) -> None:
    """Replace values that are nested too deep for a Parquet reader by JSON text."""
    row.update({name: _Json(_json(value)) for name, value in row.items() if _deeper(value, _DEEPEST)})


def _chunks(rows: Rows) -> Iterator[list[dict[str, Any]]]:
    source = rows()
    while chunk := list(islice(source, _CHUNK)):
        yield chunk


class _Json(str):
    """A value that is JSON text already."""

    __slots__ = ()


def _json(value: Any) -> str:
    return value if isinstance(value, _Json) else msgspec.json.encode(value, enc_hook=str).decode()


def _deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested more than ``levels`` deep."""
    if not isinstance(value, (list, dict)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper(item, levels - 1) for item in inner)


def _infer(values: list[Any]) -> pa.DataType | None:
    """The Arrow type of these values, None where they have none in common or it cannot be written."""
    if any(isinstance(value, _Json) for value in values):
        return None
    try:
        inferred = pa.array(values).type
    except (pa.ArrowException, OverflowError):
        return None
    return inferred if _writable(inferred) else None


def _writable(kind: pa.DataType) -> bool:
    """Parquet has no struct without fields."""
    if pa.types.is_struct(kind):
        return kind.num_fields > 0 and all(_writable(field.type) for field in kind)
    return _writable(kind.value_type) if pa.types.is_list(kind) else True


def _unify(one: pa.DataType | None, other: pa.DataType | None) -> pa.DataType | None:
    if one is None or other is None:
        return None
    try:
        schemas = [pa.schema([("value", kind)]) for kind in (one, other)]
        unified = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None
    # Whether integers inside lists and objects survive as floats is not known here.
    nested = pa.types.is_nested(unified)
    return None if nested and any(_made_floating(kind, unified) for kind in (one, other)) else unified


def _made_floating(kind: pa.DataType, unified: pa.DataType) -> bool:
    """Whether an integer somewhere in ``kind`` has become a float in ``unified``."""
    if pa.types.is_struct(kind) and pa.types.is_struct(unified):
        return any(_made_floating(field.type, unified.field(field.name).type) for field in kind)
    if pa.types.is_list(kind) and pa.types.is_list(unified):
        return _made_floating(kind.value_type, unified.value_type)
    return bool(pa.types.is_integer(kind) and pa.types.is_floating(unified))
