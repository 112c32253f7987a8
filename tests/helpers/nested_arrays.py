"""Arrays in arrays of all kinds, with the values that rows have for them."""

from collections.abc import Callable
from typing import Any

import pyarrow as pa

# Values, and what rows have.
Nested = tuple[pa.Array, list[Any]]


def _in_dictionary(array: pa.Array, values: list[Any]) -> Nested:
    return pa.DictionaryArray.from_arrays(pa.array([2, None, 0], pa.int8()), array), [values[2], None, values[0]]


def _in_runs(array: pa.Array, values: list[Any]) -> Nested:
    runs = pa.RunEndEncodedArray.from_arrays(pa.array([2, 3, 4], pa.int32()), array.slice(0, 3))
    return runs.slice(1), values[:3]


def _in_list(array: pa.Array, values: list[Any]) -> Nested:
    mask = pa.array([False, True, False])
    return pa.ListArray.from_arrays(pa.array([0, 2, 2, 3], pa.int32()), array, mask=mask), [
        values[:2],
        None,
        values[2:3],
    ]


def _in_large_list(array: pa.Array, values: list[Any]) -> Nested:
    return pa.LargeListArray.from_arrays(pa.array([0, 1, 1, 3]), array), [values[:1], [], values[1:3]]


def _in_list_of_a_size(array: pa.Array, values: list[Any]) -> Nested:
    return pa.FixedSizeListArray.from_arrays(array.slice(0, 3), 1), [[value] for value in values[:3]]


def _in_list_view(array: pa.Array, values: list[Any]) -> Nested:
    begins, sizes = pa.array([1, 0, 0], pa.int32()), pa.array([2, 2, 0], pa.int32())
    return pa.ListViewArray.from_arrays(begins, sizes, array), [values[1:3], values[:2], []]


def _in_large_list_view(array: pa.Array, values: list[Any]) -> Nested:
    begins, sizes = pa.array([2, 0, 0]), pa.array([1, 3, 0])
    return pa.LargeListViewArray.from_arrays(begins, sizes, array), [values[2:3], values[:3], []]


def _in_object(array: pa.Array, values: list[Any]) -> Nested:
    texts = pa.array(["a", "b", None])
    found = pa.StructArray.from_arrays([array.slice(0, 3), texts], ["x", "y"], mask=pa.array([False, True, False]))
    return found, [_without_nulls({"x": values[0], "y": "a"}), None, _without_nulls({"x": values[2]})]


def _without_nulls(values: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _in_map(array: pa.Array, values: list[Any]) -> Nested:
    found = pa.MapArray.from_arrays(pa.array([0, 2, 2, 3], pa.int32()), pa.array(["a", "b", "c"]), array.slice(0, 3))
    return found, [{"a": values[0], "b": values[1]}, {}, {"c": values[2]}]


def _in_sparse_union(array: pa.Array, values: list[Any]) -> Nested:
    texts = pa.array(["a", "b", "c"])
    found = pa.UnionArray.from_sparse(pa.array([7, 5, 7], pa.int8()), [texts, array.slice(0, 3)], ["t", "v"], [5, 7])
    return found, [values[0], "b", values[2]]


def _in_dense_union(array: pa.Array, values: list[Any]) -> Nested:
    kinds, places = pa.array([1, 0, 1], pa.int8()), pa.array([0, 0, 2], pa.int32())
    return pa.UnionArray.from_dense(kinds, places, [pa.array(["a"]), array]), [values[0], "a", values[2]]


def _in_extension(array: pa.Array, values: list[Any]) -> Nested:
    return pa.ExtensionArray.from_storage(pa.opaque(array.type, "kind", "vendor"), array), values


# Each makes three rows of three or more; the second of an object or a list is null.
NESTINGS: dict[str, Callable[[pa.Array, list[Any]], Nested]] = {
    "dictionary": _in_dictionary,
    "runs": _in_runs,
    "list": _in_list,
    "large list": _in_large_list,
    "list of a size": _in_list_of_a_size,
    "list view": _in_list_view,
    "large list view": _in_large_list_view,
    "object": _in_object,
    "map": _in_map,
    "sparse union": _in_sparse_union,
    "dense union": _in_dense_union,
    "extension": _in_extension,
}
