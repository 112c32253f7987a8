"""Schemas of tables: those of several files as one, and the notes of other libraries in them.

pandas notes its index and types, Hugging Face datasets their features: decoded images, names of classes. Both take
columns without a note by their Parquet types. So notes of columns that results replace go, and all others stay.
"""

from collections.abc import Collection, Mapping
from typing import Any

import msgspec
import pyarrow as pa

from rosebatch.core.errors import UserError


def joined(one: pa.Schema, other: pa.Schema, first: str, path: str) -> pa.Schema:
    """The schema of two files. Their columns may be in another order, and null throughout in one of them.

    Args:
        one, other: their schemas.
        first, path: their names, for messages.

    Raises:
        UserError: they have other columns, or columns of other types.
    """
    what = f"{path}: its columns differ from those of {first}"
    if alone := set(one.names) ^ set(other.names):
        name = min(alone)
        raise UserError(f"{what}: only {first if name in one.names else path} has {name}")
    try:
        return pa.unify_schemas([one, other])
    except pa.ArrowException:
        before, now = (dict(zip(schema.names, schema.types, strict=True)) for schema in (one, other))
        different = [f"{name} is {before[name]} there, {now[name]} here" for name in now if before[name] != now[name]]
        raise UserError(f"{what}: {'; '.join(different)}") from None


def kept_metadata(metadata: Mapping[bytes, bytes] | None, replaced: Collection[str]) -> dict[bytes, bytes] | None:
    """The metadata of a result's schema.

    Args:
        metadata: of the input's schema.
        replaced: its columns that results do not keep.
    """
    if metadata is None or not replaced:
        return None if metadata is None else dict(metadata)
    kept = dict(metadata)
    for name, without in ((b"pandas", _pandas_without), (b"huggingface", _huggingface_without)):
        if name in kept:
            try:
                kept[name] = msgspec.json.encode(without(msgspec.json.decode(kept[name]), replaced))
            except (msgspec.MsgspecError, UnicodeError, RecursionError, AttributeError, TypeError, KeyError):
                # Not what the library writes: its readers would fail on it with or without our columns.
                del kept[name]
    return kept


def _pandas_without(notes: dict[str, Any], replaced: Collection[str]) -> dict[str, Any]:
    columns = [column for column in notes["columns"] if column.get("field_name", column["name"]) not in replaced]
    return {**notes, "columns": columns}


def _huggingface_without(notes: dict[str, Any], replaced: Collection[str]) -> dict[str, Any]:
    features = {name: feature for name, feature in notes["info"]["features"].items() if name not in replaced}
    return {**notes, "info": {**notes["info"], "features": features}}
