"""Result rows as Parquet or Arrow, in one file or in many of one schema. A carried column has one type for all rows.

Carried fields are those that a result takes over from its input row.
"""

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from io import BytesIO
from itertools import islice, repeat
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from rosebatch.io.depth import is_deeper
from rosebatch.io.schema_metadata import kept_metadata

# Each call gives all rows again, as JSON.
Rows = Callable[[], Iterator[bytes]]
# Of a result's own fields.
Types = Mapping[str, pa.DataType]
# A result as JSON, and the fields that it takes over from an input with types.
_Pair = tuple[bytes, Mapping[str, Any]]

# Names of the files in a folder of results. Other tools' names are longer, and their files are not ours to replace.
PART_NAME = re.compile(r"part-\d+\.parquet")
_DIGITS = 5

# Most rows that are decoded at once, and about the most bytes that they take then: their text, and an object for each
# value in it. Rows with log-probabilities have many.
_CHUNK_ROWS = 1024
_CHUNK_BYTES = 16 * 2**20
_VALUE_BYTES = 64
# Parquet readers refuse types that are nested much deeper.
_DEEPEST = 16
_EXACT_IN_FLOAT = 2**53

_TOKEN_IDS = pa.list_(pa.int64())
_LOGPROB = [("token", pa.string()), ("token_id", pa.int64()), ("logprob", pa.float64())]
_LOGPROBS = pa.list_(pa.struct([*_LOGPROB, ("top_logprobs", pa.list_(pa.struct(_LOGPROB)))]))
_CALL = [("id", pa.string()), ("type", pa.string())]
_FUNCTION = [("name", pa.string()), ("arguments", pa.string())]
_TOOL_CALLS = pa.list_(pa.struct([*_CALL, ("function", pa.struct(_FUNCTION))]))
_CHOICE = [
    ("index", pa.int64()),
    ("text", pa.string()),
    ("reasoning_content", pa.string()),
    ("tool_calls", _TOOL_CALLS),
    ("finish_reason", pa.string()),
    ("token_ids", _TOKEN_IDS),
    ("logprobs", _LOGPROBS),
]

# Fixed, not inferred: files with and without failed rows must have the same types.
RESULT_TYPES: dict[str, pa.DataType] = {
    "index": pa.int64(),
    "text": pa.string(),
    "reasoning_content": pa.string(),
    "tool_calls": _TOOL_CALLS,
    "finish_reason": pa.string(),
    "usage": pa.struct([(name, pa.int64()) for name in ("prompt_tokens", "completion_tokens")]),
    "token_ids": _TOKEN_IDS,
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "choices": pa.list_(pa.struct(_CHOICE)),
    "error": pa.struct([("code", pa.string()), ("message", pa.string())]),
}
# Columns that a file has only if some row has them.
_OPTIONAL = {"reasoning_content", "tool_calls", "token_ids", "logprobs", "prompt_logprobs", "choices"}

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Carried(NamedTuple):
    """Columns that results take over from an input with types. JSON would lose them: it has no dates or decimals.

    Attributes:
        columns: names and types.
        rows: each call gives the values of all rows again, from the first.
    """

    columns: pa.Schema
    rows: Callable[[], Iterator[Mapping[str, Any]]]


class _TableInfo(NamedTuple):
    """What a first pass over the rows found: their schema, its columns of JSON text, and the number of rows."""

    schema: pa.Schema
    json_columns: list[str]
    num_rows: int


def write_parquet(
    path: Path,
    rows: Rows,
    carried: Carried | None = None,
    *,
    types: Types = RESULT_TYPES,
    result_column: str | None = None,
    writer: Callable[[IO[bytes], pa.Schema], Any] = pq.ParquetWriter,
) -> None:
    """Write one file. A first pass over the rows finds the types, a second one writes.

    Memory holds one chunk of rows.

    Args:
        path: the file.
        rows: the results. Without ``carried`` they include the carried fields. Carried values become JSON text where
            their types conflict, or where they are nested too deeply for Parquet readers.
        carried: columns of the input.
        types: of the result's fields, such as ``RESULT_TYPES``.
        result_column: the field of a row that holds its result; None: the result's fields are fields of the row.
        writer: of the format, such as ``pa.ipc.new_file``.

    Raises:
        OSError: the file cannot be written.
    """
    _write(path, _pairs(rows, carried), _inspect(rows, carried, types, result_column), writer)


def write_parquet_parts(
    folder: Path,
    rows: Rows,
    rows_per_file: int,
    carried: Carried | None = None,
    *,
    types: Types = RESULT_TYPES,
    result_column: str | None = None,
) -> None:
    """Like ``write_parquet``, into files of one schema. Their names sort in the order of the rows.

    Args:
        folder: created here. It gets at least one file, even without rows.
        rows: see ``write_parquet``.
        rows_per_file: rows in every file but the last.
        carried, types, result_column: see ``write_parquet``.

    Raises:
        OSError: the folder exists, or cannot be written.
    """
    folder.mkdir()
    info = _inspect(rows, carried, types, result_column)
    last = max(info.num_rows - 1, 0) // rows_per_file
    digits = max(_DIGITS, len(str(last)))
    pairs = _pairs(rows, carried)
    for number in range(last + 1):
        _write(folder / f"part-{number:0{digits}}.parquet", islice(pairs, rows_per_file), info)


def columns_without_a_type(columns: pa.Schema, writer: Callable[[IO[bytes], pa.Schema], Any]) -> list[str]:
    """The names of columns that a format cannot hold; ``writer`` as of ``write_parquet``."""
    return [field.name for field in columns if not _holds(writer, pa.schema([(field.name, field.type)]))]


def _holds(make: Callable[[IO[bytes], pa.Schema], Any], schema: pa.Schema) -> bool:
    try:
        with make(BytesIO(), schema) as writer:
            writer.write_table(pa.Table.from_pylist([{}], schema))
    except pa.ArrowException:
        return False
    return True


def _write(
    path: Path,
    pairs: Iterable[_Pair],
    info: _TableInfo,
    make: Callable[[IO[bytes], pa.Schema], Any] = pq.ParquetWriter,
) -> None:
    # Opened here: Arrow takes no names that are not UTF-8.
    with path.open("wb") as file, make(file, info.schema) as writer:
        for chunk in _chunks(pairs):
            rows = [{**carried, **msgspec.json.decode(row)} for row, carried in chunk]
            for row in rows:
                row.update({name: _json(row[name]) for name in info.json_columns if row.get(name) is not None})
            writer.write_table(pa.Table.from_pylist(rows, info.schema))


def _pairs(rows: Rows, carried: Carried | None) -> Iterator[_Pair]:
    if carried is None:
        return zip(rows(), repeat({}))
    return zip(rows(), carried.rows(), strict=True)


def _chunks(pairs: Iterable[_Pair]) -> Iterator[list[_Pair]]:
    chunk: list[_Pair] = []
    size = 0
    for pair in pairs:
        chunk.append(pair)
        size += len(pair[0]) + _VALUE_BYTES * pair[0].count(b",")
        if len(chunk) == _CHUNK_ROWS or size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _inspect(rows: Rows, carried: Carried | None, result_types: Types, result_column: str | None) -> _TableInfo:
    """Look at all rows. Of result fields only the names matter: their types are fixed."""
    own = result_types.keys() if result_column is None else {result_column}
    types: dict[str, pa.DataType | None] = {}
    if carried is not None:
        types = {field.name: field.type for field in carried.columns if field.name not in own}
    exact: set[str] = set()
    names: set[str] = set()
    num_rows = 0
    for chunk in _chunks(_pairs(rows, None)):
        fields = [_FIELDS.decode(row) for row, _ in chunk]
        num_rows += len(fields)
        names.update(*(fields if result_column is None else (_FIELDS.decode(each[result_column]) for each in fields)))
        if carried is None:
            _widen(types, exact, fields, own)
    results = pa.schema([(n, t) for n, t in result_types.items() if n in names or n not in _OPTIONAL])
    if result_column is not None:
        results = pa.schema([(result_column, pa.struct(results))])
    # A column without any value would get Arrow's null type. The values of other files would not fit it.
    columns = [pa.field(n, pa.string() if t is None or pa.types.is_null(t) else t) for n, t in types.items()]
    metadata = None
    if carried is not None:
        columns = [column.with_metadata(carried.columns.field(column.name).metadata) for column in columns]
        metadata = kept_metadata(carried.columns.metadata, set(carried.columns.names) - types.keys())
    schema = pa.schema([*columns, *results], metadata)
    return _TableInfo(schema, [n for n, t in types.items() if t is None], num_rows)


def _widen(
    types: dict[str, pa.DataType | None],
    exact: set[str],
    rows: list[dict[str, msgspec.Raw]],
    own: Container[str],
) -> None:
    """Widen the types of carried columns until they fit more rows.

    Args:
        types: the types so far; None for mixed types, which become JSON text.
        exact: columns with an integer that a float cannot hold.
        rows: their fields, still encoded.
        own: the fields of results.
    """
    for name in dict.fromkeys(n for row in rows for n in row if n not in own):
        values = [msgspec.json.decode(row[name]) if name in row else None for row in rows]
        if any(isinstance(value, int) and abs(value) > _EXACT_IN_FLOAT for value in values):
            exact.add(name)
        inferred = _infer(values)
        unified = _unify(types[name], inferred) if name in types else inferred
        lossy = name in exact and unified is not None and pa.types.is_floating(unified)
        types[name] = None if lossy else unified


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _infer(values: list[Any]) -> pa.DataType | None:
    """The Arrow type of these values; None if they share none or Parquet cannot hold it."""
    if any(is_deeper(value, _DEEPEST) for value in values):
        return None
    try:
        inferred = pa.array(values).type
    except (pa.ArrowException, OverflowError):
        return None
    if _has_floats(inferred) and any(_makes_flag_a_number(value, inferred) for value in values):
        return None
    return inferred if _writable(inferred) else None


def _has_floats(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_has_floats(field.type) for field in kind)
    return _has_floats(kind.value_type) if pa.types.is_list(kind) else bool(pa.types.is_floating(kind))


def _makes_flag_a_number(value: Any, kind: pa.DataType) -> bool:
    """Whether True or False would become 1.0 or 0.0. Arrow takes them beside floats, and says nothing."""
    if isinstance(value, bool):
        return bool(pa.types.is_floating(kind))
    if isinstance(value, list):
        return any(_makes_flag_a_number(item, kind.value_type) for item in value)
    if isinstance(value, dict):
        return any(_makes_flag_a_number(item, kind.field(name).type) for name, item in value.items())
    return False


def _writable(kind: pa.DataType) -> bool:
    """Whether Parquet can hold the type: it has no struct without fields."""
    if pa.types.is_struct(kind):
        return kind.num_fields > 0 and all(_writable(field.type) for field in kind)
    return _writable(kind.value_type) if pa.types.is_list(kind) else True


def _unify(one: pa.DataType | None, other: pa.DataType | None) -> pa.DataType | None:
    """A type for the values of both; None if there is none, or it would lose digits."""
    if one is None or other is None:
        return None
    try:
        schemas = [pa.schema([("value", kind)]) for kind in (one, other)]
        unified = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
    except pa.ArrowException:
        return None
    # Integers inside lists and objects were not checked: as floats they might lose digits.
    nested = pa.types.is_nested(unified)
    return None if nested and any(_made_floating(kind, unified) for kind in (one, other)) else unified


def _made_floating(kind: pa.DataType, unified: pa.DataType) -> bool:
    """Whether an integer somewhere in ``kind`` is a float in ``unified``."""
    if pa.types.is_struct(kind) and pa.types.is_struct(unified):
        return any(_made_floating(field.type, unified.field(field.name).type) for field in kind)
    if pa.types.is_list(kind) and pa.types.is_list(unified):
        return _made_floating(kind.value_type, unified.value_type)
    return bool(pa.types.is_integer(kind) and pa.types.is_floating(unified))
