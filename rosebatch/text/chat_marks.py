"""Kinds of chats, and marks in place of what a chat says, to see whether a template leaves anything out."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Message = Mapping[str, Any]

# Digits pass through what templates do to contents: trimming, changes of case, JSON.
_MARK = "7350924681"
_TOOL_MARK = "7350924682"
# Also behind a digit of the template's own.
_MARKS = re.compile(rf"(?=((?:{_MARK}|{_TOOL_MARK})[0-9]{{8}}))")
_LONGEST_OPTION = 64


def kind_of(messages: Sequence[Message], options: Mapping[str, Any]) -> int:
    """Chats of one kind differ only in what they say. A hash, because kinds can be long."""
    return hash((*map(_message_kind, messages), *map(_option_kind, options.items())))


def marked(messages: Sequence[Message]) -> tuple[list[Message], dict[str, str]]:
    """The chat with marks in place of its contents, and what each mark means.

    What is empty gets no mark: it leaves no trace in any text.
    """
    marks: dict[str, str] = {}

    def mark(what: str) -> str:
        found = f"{_MARK}{len(marks):08}"
        marks[found] = what
        return found

    def message(number: int, given: Message) -> Message:
        where, changed = f"messages[{number}] (role {given.get('role')!r})", dict(given)
        content = given.get("content")
        if isinstance(content, list):
            # Texts around images, which leave a placeholder.
            changed["content"] = [
                {**part, "text": mark(where)} if _is_text(part.get("text")) else part for part in content
            ]
        elif _is_text(content):
            changed["content"] = mark(where)
        if calls := given.get("tool_calls"):
            changed["tool_calls"] = [call(f"a tool call of {where}", each) for each in calls]
        return changed

    def call(where: str, given: Any) -> Any:
        parts = dict(call_parts(given))
        if parts.get("name"):
            parts["name"] = mark(where)
        if _has_arguments(parts):
            parts["arguments"] = {"mark": mark(f"the arguments of {where}")}
        return with_call_parts(given, parts)

    return [message(number, each) for number, each in enumerate(messages)], marks


def marked_tools(tools: Sequence[Any]) -> tuple[list[Any], dict[str, str]]:
    """Tools with marks in place of their names, and what each mark means."""
    marks: dict[str, str] = {}

    def mark(tool: Any) -> Any:
        parts = call_parts(tool)
        if not parts.get("name"):
            return tool
        found = f"{_TOOL_MARK}{len(marks):08}"
        marks[found] = "the tools"
        return with_call_parts(tool, {**parts, "name": found})

    return [mark(tool) for tool in tools], marks


def left_out(marks: Mapping[str, str], text: str) -> str | None:
    """What the first mark means that is not in a text; None if all are."""
    found = set(_MARKS.findall(text))
    return next((what for mark, what in marks.items() if mark not in found), None)


def says_something(message: Message) -> bool:
    """Whether a message has anything that could leave a trace in a text."""
    content = message.get("content")
    return isinstance(content, list) or _is_text(content) or bool(message.get("tool_calls"))


def call_parts(call: Any) -> Mapping[str, Any]:
    """Name and arguments of a tool call, where the call has them: in ``function``, or by themselves."""
    function = call.get("function") if isinstance(call, Mapping) else None
    found = function if isinstance(function, Mapping) else call
    return found if isinstance(found, Mapping) else {}


def with_call_parts(call: Any, parts: Mapping[str, Any]) -> Any:
    """The tool call with other parts in the same place."""
    if not isinstance(call, Mapping):
        return call
    return {**call, "function": parts} if isinstance(call.get("function"), Mapping) else parts


def _message_kind(message: Message) -> tuple[Any, ...]:
    """What decides where a template puts a message: role, names of fields, and what is empty."""
    content = message.get("content")
    says: Any = _is_text(content)
    if isinstance(content, list):
        says = tuple([(part.get("type"), _is_text(part.get("text"))) for part in content])
    calls = message.get("tool_calls")
    if not calls:
        return message.get("role"), says, *message
    return message.get("role"), says, *message, *_calls_kind(calls)


def _calls_kind(calls: Sequence[Any]) -> Iterator[bool]:
    for call in calls:
        parts = call_parts(call)
        yield bool(parts.get("name"))
        yield _has_arguments(parts)


def _option_kind(option: tuple[str, Any]) -> tuple[str, Any]:
    """An option by its value if that is short, else by its type."""
    name, value = option
    if isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) <= _LONGEST_OPTION):
        return name, value
    return name, type(value)


def _is_text(content: Any) -> bool:
    """Whether it is a text that is not blank."""
    return isinstance(content, str) and content != "" and not content.isspace()


def _has_arguments(parts: Mapping[str, Any]) -> bool:
    arguments = parts.get("arguments")
    return bool(arguments) and arguments != "{}"
