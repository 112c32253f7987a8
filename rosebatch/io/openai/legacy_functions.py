"""The older spelling of tools in chats: ``functions``, ``function_call`` and messages of the role ``function``."""

from collections.abc import Mapping
from typing import Any

from rosebatch.core.errors import RowError

_FIELDS = frozenset({"functions", "function_call"})


def as_tools(values: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """A body with tools in place of functions, and whether it had functions.

    Raises:
        RowError: it has both, or the fields are of other types.
    """
    functions = values.get("functions")
    if not functions:
        return values, False
    if values.get("tools"):
        raise RowError("invalid_field", "functions and tools cannot be used together")
    if not isinstance(functions, list):
        raise RowError("invalid_field", "functions must be a list")
    choice = values.get("function_call")
    if isinstance(choice, Mapping):
        choice = {"type": "function", "function": choice}
    found = {name: value for name, value in values.items() if name not in _FIELDS}
    return {
        **found,
        "tools": [{"type": "function", "function": function} for function in functions],
        "tool_choice": choice,
        # An answer has room for one call.
        "parallel_tool_calls": False,
    }, True


def message_as_tools(message: dict[str, Any]) -> dict[str, Any]:
    """A message with a tool call in place of a function's, or of the role ``tool`` in place of ``function``."""
    call = message.get("function_call")
    if message.get("role") == "function":
        return {**message, "role": "tool"}
    if not isinstance(call, Mapping) or message.get("tool_calls"):
        return message
    rest = {name: value for name, value in message.items() if name != "function_call"}
    return {**rest, "tool_calls": [{"type": "function", "function": call}]}
