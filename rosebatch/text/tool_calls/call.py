"""A tool call, and what every form of it has in common."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

# A JSON schema.
Schema = Mapping[str, Any]
# The terminal of a mark, in a grammar.
Terminal = Callable[[str], str]


class ToolCall(NamedTuple):
    """A call of a tool.

    Attributes:
        name: of the tool.
        arguments: JSON text as the model wrote it.
    """

    name: str
    arguments: str


class Parsed(NamedTuple):
    """What an answer says.

    Attributes:
        content: all but the calls. A broken call, or one of an unknown tool, stays here as it was written.
        calls: in the order of the text.
    """

    content: str
    calls: tuple[ToolCall, ...]


class ToolCallFormat(Protocol):
    """A form of tool calls.

    Attributes:
        marks: names of the special tokens that a text must keep to be parsed.
        opening: the mark that begins a call and nothing else; None if there is none.
    """

    marks: tuple[str, ...]
    opening: str | None

    def parse(self, text: str, tools: Mapping[str, Schema]) -> Parsed:
        """Take the calls out of an answer. Any text has a result.

        Args:
            text: of the answer, with ``marks``.
            tools: that may be called: the schema of the arguments by name.
        """
        ...

    def grammar(self, tools: Sequence["Offered"], mark: Terminal, *, parallel: bool, around: str | None = None) -> str:
        """A Lark grammar in llguidance's dialect: one call of any of the tools, or several.

        Args:
            tools: at least one.
            mark: the terminal of a mark.
            parallel: whether several calls may follow each other.
            around: the terminal of what may be around calls and in their place; None if there must be a call and
                nothing else. For forms with an ``opening``.

        Raises:
            ValueError: a schema cannot be kept.
        """
        ...


class Offered(NamedTuple):
    """A tool: its name, and the JSON schema of its arguments."""

    name: str
    schema: Schema


class _Written(msgspec.Struct):
    name: str
    # Empty if not there.
    arguments: msgspec.Raw = msgspec.Raw()
    parameters: msgspec.Raw = msgspec.Raw()


_DECODER = json.JSONDecoder()
_WRITTEN = msgspec.json.Decoder(_Written)
_OBJECT = msgspec.json.Decoder(dict[str, Any])


def value_end(text: str, begin: int) -> int | None:
    """Where the JSON value that begins in ``text`` at this place ends; None if it is broken."""
    try:
        return _DECODER.raw_decode(text, begin)[1]
    except (ValueError, RecursionError):
        return None


def arguments_at(text: str, begin: int) -> tuple[str, int] | None:
    """The JSON object that begins there as it is written, and where it ends; None if it is broken."""
    end = value_end(text, begin) if text.startswith("{", begin) else None
    return None if end is None or not _is_object(text[begin:end]) else (text[begin:end], end)


def call_at(text: str, begin: int, names: Collection[str]) -> tuple[ToolCall, int] | None:
    """A call that is a JSON object with a name and arguments, and where it ends; None if it is broken."""
    end = value_end(text, begin) if text.startswith("{", begin) else None
    if end is None:
        return None
    try:
        written = _WRITTEN.decode(text[begin:end])
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return None
    arguments = (bytes(written.arguments) or bytes(written.parameters) or b"{}").decode()
    return (ToolCall(written.name, arguments), end) if written.name in names and _is_object(arguments) else None


def calls_from(text: str, begin: int, names: Collection[str], between: str) -> tuple[list[ToolCall], int]:
    """Such calls one after the other, perhaps with ``between`` after each, and where the last one ends."""
    calls: list[ToolCall] = []
    end = at = begin
    while (found := call_at(text, at, names)) is not None:
        calls.append(found[0])
        end = at = skip_space(text, found[1])
        if text.startswith(between, at):
            at = skip_space(text, at + len(between))
    return calls, end


def skip_space(text: str, at: int) -> int:
    """The next place that is not white space."""
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _is_object(text: str) -> bool:
    try:
        _OBJECT.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return False
    return True
