"""Result rows as Parquet or Arrow, in one file or in many of one schema. A carried column has one type for all rows.

Carried fields are those that a result takes over from its input row.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, repeat
from pathlib import Path
from typing import IO, Any, NamedTuple

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from rosebatch.io.parquet_types import (
    OPTIONAL_FIELDS,
    RESULT_TYPES,
    Types,
    as_json,
    as_written,
    widen,
)
from rosebatch.io.schemas import kept_metadata

# Each call gives all rows again, as JSON.
Rows = Callable[[], Iterator[bytes]]

# Names of the files in a folder of results. Other tools' names are longer, and their files are not ours to replace.
PART_NAME = re.compile(r"part-\d+\.parquet")
_DIGITS = 5

# Most rows that are decoded at once, and about the most bytes that they take then: their text, and an object for each
# value in it. Rows with log-probabilities have many.
_CHUNK_ROWS = 1024
_CHUNK_BYTES = 16 * 2**20
_VALUE_BYTES = 64
# The fields of a row, undecoded.
FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


# A result as JSON; the fields that it takes over from an input with types, and about their bytes.
_Pair = tuple[bytes, tuple[Mapping[str, Any], int]]


class Carried(NamedTuple):
    """Columns that results take over from an input with types. JSON would lose them: it has no dates or decimals.

    Attributes:
        columns: names and types.
        rows: each call gives the values of all rows again, from the first, each with about its bytes.
    """

    columns: pa.Schema
    rows: Callable[[], Iterator[tuple[Mapping[str, Any], int]]]


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


def _write(
    path: Path, pairs: Iterable[_Pair], info: _TableInfo, make: Callable[[IO[bytes], pa.Schema], Any] = pq.ParquetWriter
) -> None:
    schema = as_written(info.schema, make)
    # Opened here: Arrow takes no names that are not UTF-8.
    with path.open("wb") as file, make(file, schema) as writer:
        for chunk in chunks(pairs):
            rows = [{**carried, **msgspec.json.decode(row)} for row, (carried, _) in chunk]
            for row in rows:
                row.update({name: as_json(row[name]) for name in info.json_columns if row.get(name) is not None})
            writer.write_table(_table(rows, schema))


def _table(rows: list[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    columns = pa.Table.from_pylist(rows, schema).columns
    for number, column in enumerate(columns):
        if pa.types.is_run_end_encoded(column.type) and not column.type.value_type.num_fields:
            columns[number] = pa.chunked_array(map(_without_stale_bytes, column.chunks), column.type)
    return pa.Table.from_arrays(columns, schema=schema)


def _without_stale_bytes(array: pa.RunEndEncodedArray) -> pa.RunEndEncodedArray:
    """The same array: under its nulls PyArrow 26 leaves what was in memory, and a file would hold it."""
    return pa.RunEndEncodedArray.from_arrays(array.run_ends, array.values.take(pa.array(range(len(array.values)))))


def _pairs(rows: Rows, carried: Carried | None) -> Iterator[_Pair]:
    if carried is None:
        return zip(rows(), repeat(({}, 0)))
    return zip(rows(), carried.rows(), strict=True)


def chunks(pairs: Iterable[_Pair]) -> Iterator[list[_Pair]]:
    """Rows in groups that memory has room for, decoded too."""
    chunk: list[_Pair] = []
    size = 0
    for row, carried in pairs:
        chunk.append((row, carried))
        size += len(row) + _VALUE_BYTES * row.count(b",") + carried[1]
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
    for chunk in chunks(_pairs(rows, None)):
        fields = [FIELDS.decode(row) for row, _ in chunk]
        num_rows += len(fields)
        names.update(*(fields if result_column is None else (FIELDS.decode(each[result_column]) for each in fields)))
        if carried is None:
            widen(types, exact, fields, own)
    results = pa.schema([(n, t) for n, t in result_types.items() if n in names or n not in OPTIONAL_FIELDS])
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
