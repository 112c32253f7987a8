"""Columns in the names of folders: ``year=2024/month=1/part.parquet``, as Hive, Spark and pandas write tables.

A row's own column of the same name wins.
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import chain
from typing import Any, cast
from urllib.parse import unquote

import msgspec
import pyarrow as pa

from rosebatch.core.errors import UserError
from rosebatch.io.columns import TEXT_FIELDS, parsed
from rosebatch.io.parse import Content
from rosebatch.io.table_values import BadValues, TextValues

_NULL = "__HIVE_DEFAULT_PARTITION__"


def is_partition(name: str) -> bool:
    """Whether a folder's name is a key and its value."""
    return name.find("=") > 0


class Partitions:
    """The keys of files, as PyArrow reads them: a column is int32 if all of its values are integers, else text.

    A key with the name of a field is read as a cell of CSV is: ``temperature=0.7`` has a number, ``suffix=7`` a text.

    Args:
        source: the folder or glob. A key that it names itself is no column.
        paths: of its files. A key that one of them lacks is null there.

    Attributes:
        schema: of the keys.

    Raises:
        UserError: a folder's name is not UTF-8.
    """

    def __init__(self, source: str, paths: Sequence[str]) -> None:
        fixed = set(source.split("/"))
        folders = (filter(is_partition, path.split("/")[:-1]) for path in paths)
        keys = [dict(_pair(part) for part in parts if part not in fixed) for parts in folders]
        columns = {}
        for name in dict.fromkeys(chain.from_iterable(keys)):
            found = [None if (value := each.get(name)) == _NULL else value for each in keys]
            columns[name] = _column(name, found)
        table = pa.table(columns)
        self.schema: pa.Schema = table.schema
        self._by_path: dict[str, dict[str, Any]] = dict(zip(paths, table.to_pylist(), strict=False))

    def of(self, path: str) -> dict[str, Any]:
        """The keys of one file, by name."""
        return self._by_path.get(path, {})

    def digest(self, contents: str) -> str:
        """The digest of all files, from that of their contents. A renamed folder has other keys, so other rows."""
        if not self.schema.names:
            return contents
        return hashlib.sha256(msgspec.json.encode([contents, *self._by_path.values()])).hexdigest()


def _column(name: str, texts: list[str | None]) -> pa.Array:
    column = pa.array(texts, pa.string())
    if not any(texts) or name in TEXT_FIELDS:
        return column
    with suppress(pa.ArrowInvalid):
        return column.cast(pa.int32())
    with suppress(pa.ArrowException):
        return pa.array([parsed(name, text) for text in texts])
    return column


def _pair(folder: str) -> tuple[str, str]:
    key, _, value = folder.partition("=")
    try:
        pair = unquote(key, errors="strict"), unquote(value, errors="strict")
        "".join(pair).encode()
    except UnicodeError:
        raise UserError(f"{folder}: the name of this folder is not UTF-8; rename it") from None
    return pair


def with_columns(schema: pa.Schema, keys: pa.Schema) -> pa.Schema:
    """The schema of a file with its keys."""
    return pa.schema([*schema, *(key for key in keys if key.name not in schema.names)], schema.metadata)


def row_with_keys(content: Content, keys: Mapping[str, Any]) -> Content:
    """The row of a table with the keys of its file."""
    if isinstance(content, TextValues | BadValues):
        return content._replace(values={**content.values, **keys})
    return {**cast(dict[str, Any], content), **keys}


def text_with_keys(text: bytes, keys: Mapping[str, Any]) -> bytes:
    """The same of JSON. The keys stand before the row's own fields: of two with one name, the last counts."""
    if not text.startswith(b"{"):
        return text
    own = text[1:].lstrip()
    return msgspec.json.encode(keys)[:-1] + (b"" if own.startswith(b"}") else b",") + own
