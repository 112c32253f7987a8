"""Columns in the names of folders: ``year=2024/month=1/part.parquet``, as Hive, Spark and pandas write tables.

A row's own column of the same name wins.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from operator import methodcaller
from typing import Any, cast
from urllib.parse import unquote

import msgspec
import pyarrow as pa

from rosebatch.io.parse import Content
from rosebatch.io.table_values import BadValues, TextValues

_NULL = "__HIVE_DEFAULT_PARTITION__"
_decoded = partial(unquote, errors="surrogateescape")
_divided = methodcaller("partition", "=")


def is_partition(name: str) -> bool:
    """Whether a folder's name is a key and its value."""
    return name.find("=") > 0


def partitions(source: str, paths: Sequence[str]) -> pa.Table:
    """The keys of files, as PyArrow reads them: a column is int32 if all of its values are integers, else text.

    Args:
        source: the folder or glob. A key that it names itself is no column.
        paths: of its files.

    Returns:
        a row for each path. A key that a path lacks is null there.
    """
    fixed = source.split("/")
    folders = [[part for part in path.split("/")[:-1] if is_partition(part) and part not in fixed] for path in paths]
    keys = [{_decoded(key): _decoded(value) for key, _, value in map(_divided, parts)} for parts in folders]
    columns = {}
    for name in dict.fromkeys(chain.from_iterable(keys)):
        found = [None if (value := each.get(name)) == _NULL else value for each in keys]
        columns[name] = pa.array(found, pa.string())
        try:
            columns[name] = columns[name].cast(pa.int32() if any(found) else pa.string())
        except pa.ArrowInvalid:
            continue
    return pa.table(columns)


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
