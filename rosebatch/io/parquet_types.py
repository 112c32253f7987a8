"""Types of the columns of results: known ones, carried ones, and those that follow from the values."""

from collections.abc import Callable, Container, Mapping
from io import BytesIO
from typing import IO, Any

import msgspec
import pyarrow as pa

from rosebatch.io.arrow_types import changed, has
from rosebatch.io.depth import is_deeper

# Of a result's own fields.
Types = Mapping[str, pa.DataType]


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

_OF_VIEWS = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}

# Columns that a file has only if some row has them.
OPTIONAL_FIELDS = {"reasoning_content", "tool_calls", "token_ids", "logprobs", "prompt_logprobs", "choices"}


def columns_without_a_type(columns: pa.Schema, writer: Callable[[IO[bytes], pa.Schema], Any]) -> list[str]:
    """The names of columns that a format cannot hold; ``writer`` as of ``write_parquet``."""
    return [field.name for field in columns if not _holds(writer, pa.schema([(field.name, field.type)]))]


def _holds(make: Callable[[IO[bytes], pa.Schema], Any], schema: pa.Schema) -> bool:
    unwritten = (_is_bool8,) if make is pa.ipc.new_file else (_is_bool8, _is_list_of_no_size)
    if any(has(each, field.type) for each in unwritten for field in schema):
        return False
    schema = as_written(schema, make)
    try:
        with make(BytesIO(), schema) as writer:
            writer.write_table(pa.Table.from_pylist([{}], schema))
    except (pa.ArrowException, OSError, UnicodeDecodeError):
        # A damaged file may name a field in bytes that are no text.
        return False
    return True


def as_written(columns: pa.Schema, writer: Callable[[IO[bytes], pa.Schema], Any]) -> pa.Schema:
    """The types that a format has for columns; ``writer`` as of ``write_parquet``.

    A file of Arrow has one dictionary for all of its batches, and the values of later ones are not known at the first:
    their values are in their place. Parquet does not tell views from plain texts and bytes, and its writer of PyArrow
    26 cannot write views in a list of structs if some list is null.
    """
    change = _without_dictionary if writer is pa.ipc.new_file else _without_inner_views
    return pa.schema([field.with_type(change(field.type)) for field in columns], columns.metadata)


def _without_dictionary(kind: pa.DataType) -> pa.DataType:
    return changed(kind, lambda each: each.value_type if pa.types.is_dictionary(each) else each)


def _without_inner_views(kind: pa.DataType) -> pa.DataType:
    return changed(kind, lambda each: _OF_VIEWS.get(each, each)) if kind.num_fields else kind


def _is_list_of_no_size(kind: pa.DataType) -> bool:
    """Parquet's writer of PyArrow 26 ends the process at a null among them."""
    return bool(pa.types.is_fixed_size_list(kind)) and kind.list_size == 0


def _is_bool8(kind: pa.DataType) -> bool:
    """Booleans of a byte: PyArrow 26 makes none of Python's."""
    return getattr(kind, "extension_name", None) == "arrow.bool8"


def widen(
    types: dict[str, pa.DataType | None], exact: set[str], rows: list[dict[str, msgspec.Raw]], own: Container[str]
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


def as_json(value: Any) -> str:
    """A value as JSON text."""
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
    """Whether True or False would become 1.0 or 0.0. Arrow takes them with floats, without an error."""
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
