"""Chats as text: a model's chat template, and a check that the text has all that the chat says.

A template without a role or tools leaves messages out, or renders them as another role's, without an
error. So the first chat of each kind is rendered once more with marks in it, and every mark must appear.
"""

import re
from collections.abc import Container, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import msgspec

from rosebatch.core.errors import RowError
from rosebatch.text.chat_marks import (
    Message,
    call_parts,
    kind_of,
    left_out,
    marked,
    marked_tools,
    says_something,
    with_call_parts,
)

# A role that no template has.
_NO_ROLE = "\ue000"
# Every template has a place for these.
_BASIC_ROLES = ("user", "assistant")
_MAX_KINDS = 4096
# Names of further fields that are tried, and of one chat those that are left out one by one: each is a rendering.
_MAX_TRIED = 64
_MAX_ALONE = 8
# Of one chat: each is a rendering more.
_MAX_ROLES = 32


class _Spelling(NamedTuple):
    """How messages with tool calls reach the template."""

    arguments_as_text: bool = False
    null_content: bool = False


# Nearly all templates take the first. Some older ones join texts, or look for a content that is null.
_SPELLINGS = (_Spelling(), _Spelling(null_content=True), _Spelling(True), _Spelling(True, True))


class ChatTemplate:
    """A Jinja template with the named tokens that it may use, such as ``eos_token``.

    Attributes:
        words: of its source; all variables and fields that it names are among them.
        place: where it is from, for messages.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str], place: str = "the chat template") -> None:
        self.source = source
        self.place = place
        self.words = frozenset(re.findall(r"\w+", source))
        self._special_tokens = special_tokens
        self._has_developer = "'developer'" in source or '"developer"' in source
        self._spellings: dict[int, _Spelling | RowError] = {}
        self._read: dict[str, bool] = {}

    def render(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str | RowError:
        """The text of a chat, or why the template cannot render all of it.

        A developer's message becomes a system message where the template has no such role. ``content: null`` is empty.
        Arguments of tool calls become objects.

        Args:
            messages: of the chat; contents are texts, or parts: ``text`` and ``image``.
            options: further variables of the template.
        """
        try:
            spelling = self._spelling(messages, options)
            if isinstance(spelling, RowError):
                return spelling
            return self._text(self._spelled(messages, spelling), options)
        except RowError as error:
            return error
        # A template is a program of others, on values of any kind: recursion, overflow, division by zero, memory.
        except Exception as error:
            reason = str(error) or type(error).__name__
            # Of a mistake in the template itself; no import tells, for plain prompts do without Jinja.
            if (line := getattr(error, "lineno", None)) is not None:
                return RowError("invalid_messages", f"{self.place}, line {line}: not a valid Jinja template ({reason})")
            return RowError("invalid_messages", f"the chat template refuses the messages: {reason}")

    def unread(self, names: Sequence[str], messages: Sequence[Message], options: Mapping[str, Any]) -> list[str]:
        """The fields of messages that do not change the text: the template neither names them, nor prints all fields.

        Args:
            names: of fields, each once.
            messages, options: of a chat that has them; see ``render``.
        """
        others = [name for name in names if name not in self.words]
        new = [name for name in others if name not in self._read]
        found = self._try(new, messages, options) if new and len(self._read) < _MAX_TRIED else {}
        return [name for name in others if not found.get(name, self._read.get(name, False))]

    def _try(self, names: Sequence[str], messages: Sequence[Message], options: Mapping[str, Any]) -> dict[str, bool]:
        """Whether each field changes the text. Of many, one that does stands for all: a rendering takes time."""
        text = self.render(messages, options)
        if isinstance(text, RowError):
            # Another chat may tell.
            return dict.fromkeys(names, True)

        def changes(left_out: Container[str]) -> bool:
            without = [{name: value for name, value in each.items() if name not in left_out} for each in messages]
            return text != self.render(without, options)

        changed = changes(frozenset(names))
        one_by_one = changed and 1 < len(names) <= _MAX_ALONE
        found = {name: changes((name,)) if one_by_one else changed for name in names}
        self._read.update(islice(found.items(), _MAX_TRIED - len(self._read)))
        return found

    def _text(self, messages: Sequence[Message], options: Mapping[str, Any]) -> str:
        # Here and not above: the import takes 0.4 s, and plain prompts do not need it.
        from rosebatch.text.bounded_jinja import bounded_renderer

        rendered, _ = bounded_renderer()(
            # Copies: to find the end of a message to continue, the library writes a mark into the message.
            conversations=[[dict(message) for message in messages]],
            chat_template=self.source,
            **{"add_generation_prompt": True, **self._special_tokens, **options},
        )
        text: str = rendered[0]
        return text

    def _spelled(self, messages: Sequence[Message], spelling: _Spelling) -> list[Message]:
        return [self._message(number, message, spelling) for number, message in enumerate(messages)]

    def _message(self, number: int, message: Message, spelling: _Spelling) -> Message:
        if message.get("content") is not None and "tool_calls" not in message and message.get("role") != "developer":
            return message
        calls = message.get("tool_calls")
        changed = {name: value for name, value in message.items() if name != "tool_calls"}
        if changed.get("role") == "developer" and not self._has_developer:
            changed["role"] = "system"
        if changed.get("content") is None:
            changed["content"] = None if calls and spelling.null_content else ""
        if calls is not None:
            where = f"messages[{number}].tool_calls"
            changed["tool_calls"] = [_call(f"{where}[{i}]", call, spelling) for i, call in enumerate(calls)]
        return changed

    def _spelling(self, messages: Sequence[Message], options: Mapping[str, Any]) -> _Spelling | RowError:
        """How to spell the messages, or what the template leaves out. Found once for each kind of chat."""
        kind = kind_of(messages, options)
        spelling = self._spellings.get(kind)
        if spelling is None:
            if len(self._spellings) >= _MAX_KINDS:
                self._spellings.clear()
            spelling = self._spellings[kind] = self._find_spelling(messages, options)
        return spelling

    def _find_spelling(self, messages: Sequence[Message], options: Mapping[str, Any]) -> _Spelling | RowError:
        chat, marks = marked(messages)
        if options.get("tools"):
            tools, tool_marks = marked_tools(options["tools"])
            options, marks = {**options, "tools": tools}, marks | tool_marks
        lost: RowError | None = None
        for spelling in _SPELLINGS if any(message.get("tool_calls") for message in messages) else _SPELLINGS[:1]:
            spelled = self._spelled(chat, spelling)
            try:
                text = self._text(spelled, options)
            except Exception:
                # Whether the template also refuses the chat itself will show.
                continue
            missing = left_out(marks, text)
            if missing is None:
                return self._role_error(spelled, options, text) or spelling
            lost = lost or RowError("invalid_messages", f"the chat template leaves out {missing}")
        return lost or _SPELLINGS[0]

    def _role_error(self, messages: Sequence[Message], options: Mapping[str, Any], text: str) -> RowError | None:
        """The error of a role that leaves no trace: its messages are rendered like those of any other role."""

        def tells_apart(role: str, other: str) -> bool:
            others = [{**message, "role": other} if message.get("role") == role else message for message in messages]
            try:
                return self._text(others, options) != text
            except Exception:
                return True

        roles = dict.fromkeys(message.get("role") for message in messages if says_something(message))
        if len(roles) > _MAX_ROLES:
            return RowError("invalid_messages", f"the messages have {len(roles)} roles, more than {_MAX_ROLES}")
        for role in roles:
            if not isinstance(role, str) or role in _BASIC_ROLES or tells_apart(role, _NO_ROLE):
                continue
            # Some templates render whatever is neither the user's nor the assistant's as a system message.
            if role != "system" or not all(tells_apart(role, basic) for basic in _BASIC_ROLES):
                return RowError("invalid_messages", f"the chat template has no role {role!r}")
        return None


def _call(where: str, call: Any, spelling: _Spelling) -> Any:
    """A tool call with its arguments as an object, or as JSON text.

    Raises:
        RowError: they are no JSON object, or it calls nothing: a template would leave no trace of it.
    """
    parts = call_parts(call)
    if not isinstance(name := parts.get("name"), str) or not name:
        raise RowError("invalid_messages", f"{where}: has no name of a function")
    given = arguments = parts.get("arguments")
    if isinstance(given, str):
        try:
            arguments = msgspec.json.decode(given, type=dict[str, Any]) if given.strip() else {}
        except (msgspec.MsgspecError, UnicodeError, RecursionError):
            arguments = ()
    if not isinstance(arguments, Mapping | None):
        raise RowError("invalid_messages", f"{where}: its arguments are not a JSON object")
    if spelling.arguments_as_text and isinstance(arguments, Mapping):
        arguments = given if isinstance(given, str) else msgspec.json.encode(arguments).decode()
    return call if arguments is given else with_call_parts(call, {**parts, "arguments": arguments})
