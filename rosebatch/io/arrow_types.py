"""Types of Arrow that hold others: lists, objects, maps, dictionaries, runs, unions and types of extensions."""

from collections.abc import Callable

import pyarrow as pa

_LISTS = (
    (pa.types.is_list, pa.list_),
    (pa.types.is_large_list, pa.large_list),
    (pa.types.is_list_view, pa.list_view),
    (pa.types.is_large_list_view, pa.large_list_view),
)


def has(is_one: Callable[[pa.DataType], bool], kind: pa.DataType) -> bool:
    """Whether a type is one of some kind, or holds one."""
    return is_one(kind) or any(has(is_one, each) for each in inner_types(kind))


def inner_types(kind: pa.DataType) -> list[pa.DataType]:
    """The types that a type is made of."""
    if isinstance(kind, pa.BaseExtensionType):
        return [kind.storage_type]
    if pa.types.is_dictionary(kind):
        return [kind.value_type]
    return [kind.field(number).type for number in range(kind.num_fields)]


def changed(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """A type in which each type is another, from the innermost on. One of an extension that changes is its storage."""
    inner = inner_types(kind)
    made = [changed(each, change) for each in inner]
    return change(kind if made == inner else _remade(kind, made))


def _remade(kind: pa.DataType, inner: list[pa.DataType]) -> pa.DataType:
    if isinstance(kind, pa.BaseExtensionType):
        return inner[0]
    if pa.types.is_dictionary(kind):
        return pa.dictionary(kind.index_type, inner[0], kind.ordered)
    if pa.types.is_run_end_encoded(kind):
        return pa.run_end_encoded(*inner)
    fields = [kind.field(number).with_type(each) for number, each in enumerate(inner)]
    if pa.types.is_struct(kind):
        return pa.struct(fields)
    if pa.types.is_union(kind):
        return pa.union(fields, kind.mode, kind.type_codes)
    if pa.types.is_map(kind):
        return pa.map_(*inner[0], kind.keys_sorted)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(fields[0], kind.list_size)
    return next(make(fields[0]) for holds, make in _LISTS if holds(kind))
