"""Result rows -> a JSONL or Parquet file that appears whole under its name, or JSONL on stdout."""

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq

from rosebatch.errors import UserError
from rosebatch.io.rows import RESULT_FIELDS

_CHUNK = 1024
_DEEPEST = 16
_EXACT_IN_FLOAT = 2**53

# Fixed, not inferred: a file without a failed row must have the same types as one with.
_RESULT_TYPES: dict[str, pa.DataType] = {
    "index": pa.int64(),
    "text": pa.string(),
    "finish_reason": pa.string(),
    "usage": pa.struct([(name, pa.int64()) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")]),
    "token_ids": pa.list_(pa.int64()),
    "error": pa.struct([("code", pa.string()), ("message", pa.string())]),
}


class Writer(Protocol):
    """Takes result rows in output order."""

    def write(self, row: dict[str, Any]) -> None:
        """Add a row."""
        ...

    def finish(self) -> None:
        """Make the output visible under its name."""
        ...

    def abandon(self) -> None:
        """Give up: nothing appears under the name; what is of use of the temporary file stays."""
        ...


def open_writer(target: str | None, *, token_ids: bool, columns: pa.Schema | None) -> Writer:
    """A writer for ``-o``.

    Args:
        target: a path, Parquet if it ends in ``.parquet`` or ``.pq``; None or ``-`` for stdout.
        token_ids: whether rows have ``token_ids``.
        columns: types of the carried columns, where the input has them.

    Raises:
        UserError: the output cannot be created.
    """
    if target is None or target == "-":
        return JsonlWriter(sys.stdout.buffer)
    path = Path(target)
    if not path.name or path.is_dir():
        raise UserError(f"{path}: is a folder, name a file for the results")
    part = path.with_name(path.name + ".part")
    try:
        file = part.open("w+b")
    except OSError as error:
        raise UserError(f"{part}: {error.strerror}") from None
    if path.suffix.lower() in (".parquet", ".pq"):
        return ParquetWriter(file, part, path, token_ids=token_ids, columns=columns)
    return JsonlWriter(file, part, path)


class JsonlWriter:
    """One JSON object a line; to a file, under a temporary name until ``finish``."""

    def __init__(self, file: IO[bytes], part: Path | None = None, path: Path | None = None) -> None:
        self._file = file
        self._part = part
        self._path = path

    def write(self, row: dict[str, Any]) -> None:
        """Add a row, visible at once where someone reads along."""
        self._file.write(msgspec.json.encode(row, enc_hook=str) + b"\n")
        self._file.flush()

    def finish(self) -> None:
        """Rename the file to its name."""
        if self._part is not None and self._path is not None:
            self._file.close()
            self._part.replace(self._path)

    def abandon(self) -> None:
        """Leave the temporary file if it holds any result."""
        if self._part is not None:
            self._file.close()
            if self._part.stat().st_size == 0:
                self._part.unlink()


class ParquetWriter:
    """A Parquet file whose carried columns get the one type that fits all rows.

    Types are known only when all rows are: until then rows lie in a spool beside the target, never in memory.
    """

    def __init__(self, file: IO[bytes], part: Path, path: Path, *, token_ids: bool, columns: pa.Schema | None) -> None:
        self._file = file
        self._part = part
        self._path = path
        self._columns = columns
        self._results = {n: t for n, t in _RESULT_TYPES.items() if token_ids or n != "token_ids"}

    def write(self, row: dict[str, Any]) -> None:
        """Spool a row, values that are nested too deep for a Parquet reader as JSON text."""
        typed = set() if self._columns is None else set(self._columns.names)
        deep = {n: _Json(_json(v)) for n, v in row.items() if n not in typed and _deeper(v, _DEEPEST)}
        pickle.dump({**row, **deep} if deep else row, self._file)

    def finish(self) -> None:
        """Settle the types, write the file, rename it to its name."""
        schema, as_json = self._schema()
        whole = self._part.with_name(self._part.name + ".parquet")
        try:
            with pq.ParquetWriter(whole, schema) as writer:
                for rows in self._chunks():
                    for row in rows:
                        row.update({n: _json(row[n]) for n in as_json if row.get(n) is not None})
                    writer.write_table(pa.Table.from_pylist(rows, schema))
        except BaseException:
            whole.unlink(missing_ok=True)
            raise
        self._file.close()
        whole.replace(self._path)
        self._part.unlink()

    def abandon(self) -> None:
        """Remove the spool: it is readable to this class alone."""
        self._file.close()
        self._part.unlink()

    def _schema(self) -> tuple[pa.Schema, list[str]]:
        """The file's schema, and the carried columns that hold mixed types and are written as JSON text."""
        types: dict[str, pa.DataType | None] = {}
        exact: set[str] = set()
        if self._columns is not None:
            types = {field.name: field.type for field in self._columns if field.name not in RESULT_FIELDS}
        else:
            for rows in self._chunks():
                for name in dict.fromkeys(n for row in rows for n in row if n not in RESULT_FIELDS):
                    values = [row.get(name) for row in rows]
                    if any(isinstance(value, int) and abs(value) > _EXACT_IN_FLOAT for value in values):
                        exact.add(name)
                    inferred = _infer(values)
                    unified = _unify(types[name], inferred) if name in types else inferred
                    lossy = name in exact and unified is not None and pa.types.is_floating(unified)
                    types[name] = None if lossy else unified
        as_json = [name for name, kind in types.items() if kind is None]
        # A column without a single value would get Arrow's null type, which other files' rows do not fit.
        fields = [(name, pa.string() if k is None or pa.types.is_null(k) else k) for name, k in types.items()]
        return pa.schema([*fields, *self._results.items()]), as_json

    def _chunks(self) -> Iterator[list[dict[str, Any]]]:
        rows: list[dict[str, Any]] = []
        end = self._file.seek(0, 2)
        self._file.seek(0)
        while self._file.tell() < end:
            rows.append(pickle.load(self._file))
            if len(rows) == _CHUNK:
                yield rows
                rows = []
        if rows:
            yield rows


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
