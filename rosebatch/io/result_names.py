"""The names of a result's fields, and the input fields that would collide with them."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

from rosebatch.core.errors import RowError

# A result has these next to the fields that it takes over from its row, or in one field of their own.
RESULT_FIELDS = (
    "index", "text", "reasoning_content", "tool_calls", "finish_reason", "choices", "usage", "token_ids", "logprobs",
    "prompt_logprobs", "error",
)  # fmt: skip
# A request has fields of these names too. In a result they are lists.
LISTS_IN_RESULTS = frozenset({"logprobs", "prompt_logprobs"})


@cache
def reserved_names(result_column: str | None, own: Sequence[str] = RESULT_FIELDS) -> frozenset[str]:
    """The names that a result needs for itself.

    Args:
        result_column: the one field that holds all of a result's own; None: they are fields themselves.
        own: the fields of a result, such as ``RESULT_FIELDS``.
    """
    return frozenset(own) if result_column is None else frozenset({result_column})


def collisions(values: Mapping[str, Any], result_column: str | None, own: Sequence[str] = RESULT_FIELDS) -> list[str]:
    """The fields of an input row that its result would overwrite; see ``reserved_names``."""
    if reserved_names(result_column, own).isdisjoint(values):
        return []
    if result_column is not None:
        return [result_column]
    return [name for name in own if name in values and (name not in LISTS_IN_RESULTS or isinstance(values[name], list))]


def is_of_a_result(name: str, value: Any) -> bool:
    """Whether a field that both requests and results have is one of an earlier result."""
    return name in LISTS_IN_RESULTS and isinstance(value, list)


def require_no_collision(
    values: Mapping[str, Any], result_column: str | None, own: Sequence[str] = RESULT_FIELDS
) -> None:
    """Check one row.

    Raises:
        RowError: its result would overwrite some of its fields.
    """
    if names := collisions(values, result_column, own):
        raise RowError("name_collision", collision_message(names, result_column))


def collision_message(names: Sequence[str], result_column: str | None) -> str:
    """What is wrong, and what mends it."""
    if result_column is not None:
        return f"--result-column {result_column}: the input has a field of this name; choose another"
    return (
        f"results have fields of these names too: {', '.join(names)}. Give --result-column NAME to put the results' "
        "fields into one of their own, or --columns to name what results keep of the input"
    )


def in_order(names: Iterable[str], own: Sequence[str]) -> list[str]:
    """Names in the order of a result's fields, then all others."""
    given = set(names)
    return [name for name in own if name in given] + sorted(given.difference(own))
