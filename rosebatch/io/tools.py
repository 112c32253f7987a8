"""Tools that a row offers to the model, and the calls that an answer makes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class ToolCall(NamedTuple):
    """A call of a tool.

    Attributes:
        name: of the tool.
        arguments: JSON text as the model wrote it.
    """

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class ToolUse:
    """What a chat may call.

    Attributes:
        tools: as the chat API writes them: ``{"type": "function", "function": {"name", "description", "parameters"}}``.
        choice: ``none``, ``auto`` or ``required``.
        name: the one tool that must be called; None leaves the choice.
        parallel: whether an answer may call several.
    """

    tools: Sequence[Mapping[str, Any]]
    choice: str = "auto"
    name: str | None = None
    parallel: bool = True
