"""How many bytes each row of an Arrow array takes as values of its own.

Arrow shares: a value of a dictionary, a run or a view may be that of many rows, and takes its bytes once for each row
that Python gets.
"""

from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

from rosebatch.io.arrow_types import has

# Of any Python value that is no text, and of each item of a list. Here, and of lists and objects as such, a sixth of
# what CPython takes: values may take six times the bytes of a row, as those of a line of JSON may.
_POINTER, _LIST, _OBJECT, _NAMED = 8, 16, 64, 32
TEXTS = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
_VIEWS = (pa.string_view(), pa.binary_view())

# One number for each row.
Sizes = np.ndarray[Any, np.dtype[np.int64]]


@cache
def shares(kind: pa.DataType) -> bool:
    """Whether rows of this type may have one value in common."""
    return has(_shares, kind)


def _shares(kind: pa.DataType) -> bool:
    lists = pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
    return bool(lists or pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind) or kind in _VIEWS)


@cache
def shares_or_nests(kind: pa.DataType) -> bool:
    """Whether rows of this type may take far more than the bytes of their batch."""
    return has(pa.types.is_nested, kind) or shares(kind)


def row_sizes(array: pa.Array) -> Sizes:
    """Bytes of each row of an array that is valid; about, and for nulls none or a few."""
    kind, rows = array.type, len(array)
    if not rows:
        # PyArrow follows offsets of a list without rows, which no check has seen.
        return np.zeros(0, np.int64)
    if kind in TEXTS:
        return _lengths("binary_length", array)
    if kind in _VIEWS:
        # Of each row: its length, then its bytes or where they are.
        views = np.frombuffer(array.buffers()[1], np.int32).reshape(-1, 4)[array.offset : array.offset + rows, 0]
        lengths: Sizes = views.astype(np.int64)
        return lengths
    if (of_each := _size_of_each(array)) is not None:
        return np.full(rows, of_each)
    if isinstance(array, pa.ExtensionArray):
        return row_sizes(array.storage)
    if pa.types.is_dictionary(kind):
        values = np.append(row_sizes(array.dictionary), 0)
        return np.take(values, _numbers(array.indices, null=len(array.dictionary)))
    if pa.types.is_run_end_encoded(kind):
        places = np.searchsorted(_numbers(array.run_ends), array.offset + np.arange(rows), side="right")
        of_runs: Sizes = row_sizes(array.values)[places]
        return of_runs
    if pa.types.is_struct(kind):
        # Not flattened: PyArrow 26 ends the process where a null of the struct would be one of a union.
        fields = [row_sizes(array.field(number)) for number in range(kind.num_fields)]
        found: Sizes = np.where(array.is_valid(), np.sum(fields, axis=0), 0) + _OBJECT
        return found
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        begins, lengths = _numbers(array.offsets), _numbers(array.sizes)
        return _sums(array.values, begins, begins + lengths)
    if pa.types.is_map(kind):
        # No cast to a list: PyArrow's makes an array that is none of values that are all null.
        ends = _numbers(array.offsets)
        return _NAMED * np.diff(ends) + _sums(array.keys, ends[:-1], ends[1:]) + _sums(array.items, ends[:-1], ends[1:])
    if pa.types.is_nested(kind) and not pa.types.is_union(kind):
        ends = np.append(0, np.cumsum(_lengths("list_value_length", array)))
        return _sums(array.flatten(), ends[:-1], ends[1:])
    raise AssertionError(kind)


def _size_of_each(array: pa.Array) -> int | None:
    """Bytes of each row, where all are alike; None where they may differ."""
    kind, rows = array.type, max(len(array), 1)
    if pa.types.is_struct(kind):
        found = [_size_of_each(array.field(number)) for number in range(kind.num_fields)]
        fields = [size for size in found if size is not None]
        return _OBJECT + sum(fields) if len(fields) == len(found) else None
    if pa.types.is_union(kind):
        return max(_POINTER, int(array.get_total_buffer_size()) // rows)
    if pa.types.is_nested(kind) or shares(kind) or kind in TEXTS or isinstance(array, pa.ExtensionArray):
        return None
    return max(_POINTER, int(array.nbytes) // rows)


def _sums(items: pa.Array, begins: Sizes, ends: Sizes) -> Sizes:
    """Of lists with the items from each begin to its end."""
    found: Sizes = ends - begins
    if (of_each := _size_of_each(items)) is not None:
        # However many there are, they take no memory here.
        found *= of_each + _POINTER
    else:
        sizes = row_sizes(items)
        sizes += _POINTER
        before = np.append(0, np.cumsum(sizes, out=sizes))
        found = before[ends] - before[begins]
    found += _LIST
    return found


def _lengths(of_kind: str, array: pa.Array) -> Sizes:
    # Only now: it takes a tenth of the start of a job, which may have no table.
    import pyarrow.compute as pc

    return _numbers(pc.call_function(of_kind, [array]))


def _numbers(array: pa.Array, null: int = 0) -> Sizes:
    found: Sizes = array.fill_null(null).to_numpy(zero_copy_only=False).astype(np.int64)
    return found
