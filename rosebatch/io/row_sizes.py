"""How many bytes each row of an Arrow array takes as values of its own.

Arrow shares: a value of a dictionary, a run or a view may be that of many rows, and takes its bytes once for each row
that Python gets.
"""

from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

# Of any Python value that is no text, and of each item of a list.
_POINTER = 8
_TEXTS = (pa.string(), pa.large_string(), pa.binary(), pa.large_binary())
_VIEWS = (pa.string_view(), pa.binary_view())

# One number for each row.
Sizes = np.ndarray[Any, np.dtype[np.int64]]


@cache
def shares(kind: pa.DataType) -> bool:
    """Whether rows of this type may have one value in common."""
    own = pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind) or kind in _VIEWS
    own |= pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind)
    inner = kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind
    fields = (inner.field(number).type for number in range(inner.num_fields))
    return own or any(map(shares, fields if inner is kind else [inner]))


def row_sizes(array: pa.Array) -> Sizes:
    """Bytes of each row of an array that is valid; about, and for nulls none or a few."""
    kind, rows = array.type, len(array)
    if not rows:
        # PyArrow follows offsets of a list without rows, which no check has seen.
        return np.zeros(0, np.int64)
    if kind in _TEXTS:
        return _numbers(pc.binary_length(array))
    if kind in _VIEWS:
        # Of each row: its length, then its bytes or where they are.
        views = np.frombuffer(array.buffers()[1], np.int32).reshape(-1, 4)[array.offset : array.offset + rows, 0]
        lengths: Sizes = views.astype(np.int64)
        return lengths
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
        found: Sizes = np.full(rows, _POINTER)
        for field in array.flatten():
            found += row_sizes(field)
        return found
    if pa.types.is_list_view(kind) or pa.types.is_large_list_view(kind):
        begins, lengths = _numbers(array.offsets), _numbers(array.sizes)
        return _sums(row_sizes(array.values), begins, begins + lengths)
    if pa.types.is_map(kind):
        # No cast to a list: PyArrow's makes an array that is none of values that are all null.
        ends = _numbers(array.offsets)
        return _sums(_POINTER + row_sizes(array.keys) + row_sizes(array.items), ends[:-1], ends[1:])
    if pa.types.is_nested(kind) and not pa.types.is_union(kind):
        ends = np.cumsum(_numbers(pc.list_value_length(array)))
        return _sums(row_sizes(array.flatten()), np.append(0, ends)[:-1], ends)
    size = array.get_total_buffer_size() if pa.types.is_union(kind) else array.nbytes
    return np.full(rows, max(_POINTER, size // rows))


def _sums(items: Sizes, begins: Sizes, ends: Sizes) -> Sizes:
    """Of the items from each begin to its end."""
    before = np.append(0, np.cumsum(items + _POINTER))
    found: Sizes = before[ends] - before[begins]
    return found


def _numbers(array: pa.Array, null: int = 0) -> Sizes:
    found: Sizes = array.fill_null(null).to_numpy(zero_copy_only=False).astype(np.int64)
    return found
