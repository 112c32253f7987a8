"""Tools that a row offers to the model."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from rosebatch.core.errors import RowError
from rosebatch.text.shared_tools import shared_tools
from rosebatch.text.tool_calls.call import Offered, Schema
from rosebatch.text.tool_calls.call import ToolCall as ToolCall

# Schemas of arguments.
_ANY: Schema = {"type": "object"}
_NOTHING: Schema = {"type": "object", "properties": {}, "additionalProperties": False}

# Beyond any sense. To render one takes a kilobyte.
_MAX_TOOLS = 30_000
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class ToolFunction(msgspec.Struct):
    """What can be called. All its other fields go to the chat template."""

    name: str
    parameters: dict[str, Any] | None = None


class Tool(msgspec.Struct):
    """A tool, as the chat API writes it."""

    type: Literal["function"]
    function: ToolFunction


class _Named(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NamedTool(msgspec.Struct, forbid_unknown_fields=True):
    """The one tool that must be called, as the chat API writes it."""

    type: Literal["function"]
    function: _Named


ToolChoice = Literal["none", "auto", "required"] | NamedTool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a chat may call.

    Attributes:
        tools: as the chat API writes them: ``{"type": "function", "function": {"name", "description", "parameters"}}``.
        choice: ``none``, ``auto`` or ``required``.
        name: the one tool that must be called; None leaves the choice.
        parallel: whether an answer may call several.
        may_stay_text: whether a model is served too whose form of calls is unknown.
    """

    tools: Sequence[Mapping[str, Any]]
    choice: str = "auto"
    name: str | None = None
    parallel: bool = True
    may_stay_text: bool = False

    @property
    def schemas(self) -> dict[str, Schema]:
        """Schemas of the arguments of the tools whose calls are parsed, by name."""
        functions = [] if self.choice == "none" else [tool["function"] for tool in self.tools]
        return {function["name"]: function.get("parameters") or {} for function in functions}

    @property
    def is_strict(self) -> bool:
        """Whether the model decides, and the calls of some tools have to match their schemas."""
        return self.choice == "auto" and any(tool["function"].get("strict") is True for tool in self.tools)

    @property
    def callable(self) -> list[Offered]:
        """The tools that a call may take. One without parameters takes an empty object.

        Where the model decides, arguments of a tool that is not strict may be any object.
        """
        found = []
        for function in (tool["function"] for tool in self.tools):
            is_free = self.is_strict and function.get("strict") is not True
            if self.name in (None, function["name"]):
                schema = _ANY if is_free else function.get("parameters") or _NOTHING
                found.append(Offered(function["name"], schema))
        return found


def tool_use(
    tools: Sequence[Tool] | None, given: Sequence[Mapping[str, Any]], choice: ToolChoice | None, parallel: bool | None
) -> ToolUse | None:
    """What a row may call; None without tools.

    Args:
        tools: checked.
        given: the same as decoded from JSON.
        choice: None is ``auto``.
        parallel: None is True.

    Raises:
        RowError: there are too many, names repeat or are impossible, or a tool must be called that is not there.
    """
    if len(tools or ()) > _MAX_TOOLS:
        raise RowError("invalid_field", f"tools: there are {len(tools or ())}, more than {_MAX_TOOLS}")
    names: set[str] = set()
    for name in (tool.function.name for tool in tools or ()):
        if not _NAME.fullmatch(name):
            raise RowError("invalid_field", f"tools: a name has 1 to 64 letters, digits, _, . and -, not {name!r}")
        if name in names:
            raise RowError("invalid_field", f"tools: the name {name} is used twice")
        names.add(name)
    named = choice.function.name if isinstance(choice, NamedTool) else None
    if named is not None and named not in names:
        raise RowError("invalid_field", f"tool_choice: there is no tool {named}")
    if not names:
        if choice == "required":
            raise RowError("invalid_field", "tool_choice required needs tools")
        return None
    kind = "required" if isinstance(choice, NamedTool) else choice or "auto"
    return ToolUse(shared_tools(given), kind, named, parallel is not False)


def call_fields(calls: Sequence[ToolCall], row: int, choice: int) -> list[dict[str, Any]]:
    """Calls as the chat API writes them. Their ids follow from their place, so that a resumed run gives the same.

    Args:
        calls: of one choice.
        row: index of the row.
        choice: number of the choice.
    """
    return [
        {"id": f"call_{row}_{choice}_{number}", "type": "function", "function": call._asdict()}
        for number, call in enumerate(calls)
    ]
