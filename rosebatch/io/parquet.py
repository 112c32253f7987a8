"""Result rows as Parquet, in one file or many of one schema; carried columns get the one type that fits all rows."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, repeat
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

# All rows as JSON, from the first, at each call.
Rows = Callable[[], Iterator[bytes]]
# A row, and what is carried through to it from elsewhere.
_Pair = tuple[bytes, Mapping[str, Any]]

# The files of a folder that is one table. Other tools' parts have more in their names, and are not ours to replace.
PART_NAME = re.compile(r"part-\d+\.parquet")
_DIGITS = 5

# What is decoded at a time: so many rows, or fewer long ones, such as those with log-probabilities.
_CHUNK_ROWS = 1024
_CHUNK_BYTES = 8 * 2**20
_DEEPEST = 16
_EXACT_IN_FLOAT = 2**53

_TOKEN_IDS = pa.list_(pa.int64())
_LOGPROB = [("token", pa.string()), ("token_id", pa.int64()), ("logprob", pa.float64())]
_LOGPROBS = pa.list_(pa.struct([*_LOGPROB, ("top_logprobs", pa.list_(pa.struct(_LOGPROB)))]))
_CHOICE = [
    ("index", pa.int64()),
    ("text", pa.string()),
    ("finish_reason", pa.string()),
    ("token_ids", _TOKEN_IDS),
    ("logprobs", _LOGPROBS),
]

# Fixed, not inferred: a file without a failed row must have the same types as one with.
_RESULT_TYPES: dict[str, pa.DataType] = {
    "index": pa.int64(),
    "text": pa.string(),
    "finish_reason": pa.string(),
    "usage": pa.struct([(name, pa.int64()) for name in ("prompt_tokens", "completion_tokens")]),
    "token_ids": _TOKEN_IDS,
    "logprobs": _LOGPROBS,
    "prompt_logprobs": _LOGPROBS,
    "choices": pa.list_(pa.struct(_CHOICE)),
    "error": pa.struct([("code", pa.string()), ("message", pa.string())]),
}
# Columns only where a row has them.
_OPTIONAL = {"token_ids", "logprobs", "prompt_logprobs", "choices"}

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Carried(NamedTuple):
    """What the rows of an input with types bring to their results, since JSON knows neither dates nor decimals.

    Attributes:
        columns: names and types.
        rows: the values of all rows, from the first, at each call.
    """

    columns: pa.Schema
    rows: Callable[[], Iterator[Mapping[str, Any]]]


class _Layout(NamedTuple):
    """What one pass over all rows has found: their schema, the columns of it that are JSON text, and their number."""

    schema: pa.Schema
    as_json: list[str]
    num_rows: int


def write_parquet(path: Path, rows: Rows, carried: Carried | None = None) -> None:
    """Settle the types in one pass over the rows, write them in another: memory holds a chunk of them.

    Args:
        path: of the file.
        rows: results, and without ``carried`` the carried fields too. Their values, where they are nested too deep for
            a Parquet reader or of types that do not go together, become JSON text.
        carried: columns of the input.

    Raises:
        OSError: the file cannot be written.
    """
    _write(path, _pairs(rows, carried), _settle(rows, carried))


def write_parquet_parts(folder: Path, rows: Rows, rows_per_file: int, carried: Carried | None = None) -> None:
    """As ``write_parquet``, into files of one schema whose names have the order of the rows; at least one file.

    Args:
        folder: to make.
        rows: see ``write_parquet``.
        rows_per_file: all files but the last have so many.
        carried: see ``write_parquet``.

    Raises:
        OSError: the folder is there already, or cannot be written to.
    """
    folder.mkdir()
    layout = _settle(rows, carried)
    last = max(layout.num_rows - 1, 0) // rows_per_file
    digits = max(_DIGITS, len(str(last)))
    pairs = _pairs(rows, carried)
    for number in range(last + 1):
        _write(folder / f"part-{number:0{digits}}.parquet", islice(pairs, rows_per_file), layout)


def _write(path: Path, pairs: Iterable[_Pair], layout: _Layout) -> None:
    with pq.ParquetWriter(path, layout.schema) as writer:
        for chunk in _chunks(pairs):
            rows = [{**carried, **msgspec.json.decode(row)} for row, carried in chunk]
            for row in rows:
                row.update({name: _json(row[name]) for name in layout.as_json if row.get(name) is not None})
            writer.write_table(pa.Table.from_pylist(rows, layout.schema))


def _pairs(rows: Rows, carried: Carried | None) -> Iterator[_Pair]:
    if carried is None:
        return zip(rows(), repeat({}))
    return zip(rows(), carried.rows(), strict=True)


def _chunks(pairs: Iterable[_Pair]) -> Iterator[list[_Pair]]:
    chunk: list[_Pair] = []
    size = 0
    for pair in pairs:
        chunk.append(pair)
        size += len(pair[0])
        if len(chunk) == _CHUNK_ROWS or size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _settle(rows: Rows, carried: Carried | None) -> _Layout:
    """Look at all rows, of results at their names alone."""
    types: dict[str, pa.DataType | None] = {}
    if carried is not None:
        types = {field.name: field.type for field in carried.columns if field.name not in _RESULT_TYPES}
    exact: set[str] = set()
    names: set[str] = set()
    num_rows = 0
    for chunk in _chunks(_pairs(rows, None)):
        fields = [_FIELDS.decode(row) for row, _ in chunk]
        num_rows += len(fields)
        names.update(*fields)
        if carried is None:
            _widen(types, exact, fields)
    # A column without a single value would get Arrow's null type, which other files' rows do not fit.
    columns = [(n, pa.string() if t is None or pa.types.is_null(t) else t) for n, t in types.items()]
    results = [(n, t) for n, t in _RESULT_TYPES.items() if n in names or n not in _OPTIONAL]
    return _Layout(pa.schema([*columns, *results]), [n for n, t in types.items() if t is None], num_rows)


def _widen(types: dict[str, pa.DataType | None], exact: set[str], rows: list[dict[str, msgspec.Raw]]) -> None:
    """Make the types of carried columns fit more rows.

    Args:
        types: so far; None for mixed types, which are written as JSON text.
        exact: columns that hold an integer which a float cannot.
        rows: fields yet to be decoded.
    """
    for name in dict.fromkeys(n for row in rows for n in row if n not in _RESULT_TYPES):
        values = [msgspec.json.decode(row[name]) if name in row else None for row in rows]
        if any(isinstance(value, int) and abs(value) > _EXACT_IN_FLOAT for value in values):
            exact.add(name)
        inferred = _infer(values)
        unified = _unify(types[name], inferred) if name in types else inferred
        lossy = name in exact and unified is not None and pa.types.is_floating(unified)
        types[name] = None if lossy else unified


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _deeper(value: Any, levels: int) -> bool:
    """Whether lists and objects are nested more than ``levels`` deep."""
    if not isinstance(value, (list, dict)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_deeper(item, levels - 1) for item in inner)


def _infer(values: list[Any]) -> pa.DataType | None:
    """The Arrow type of these values, None where they have none in common or it cannot be written."""
    # A Parquet reader would refuse it.
    if any(_deeper(value, _DEEPEST) for value in values):
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
