"""A request to ``/v1/responses`` as one to ``/v1/chat/completions``, which asks for the same answer.

Fields follow the public API reference. Those of chats that mean the same have the same names.
"""

from collections.abc import Mapping
from typing import Any

import msgspec

from rosebatch.core.errors import RowError
from rosebatch.io.fields import to_struct
from rosebatch.io.openai.fields import Refused
from rosebatch.io.text_only import joined_text

# Fields that change nothing in a local run, and why. Those of chats are ignored too.
IGNORED = {
    "background_options": "nothing runs in the background",
    "max_tool_calls": "it limits calls that the service makes itself",
}
# Fields that are not served.
REFUSED = {
    "access_programs": Refused("nothing is accessed"),
    "background": Refused("a batch has no background", (False,)),
    "context_management": Refused("nothing is compacted: shorten the input", ([],)),
    "conversation": Refused("no conversation is kept: put it into input"),
    "image": Refused("answers are text"),
    "previous_response_id": Refused("no response is kept: put it into input"),
    "prompt": Refused("no prompt is kept: put it into input"),
    "truncation": Refused("nothing is left out: use truncate_prompt_tokens", ("disabled",)),
}
_LOGPROBS = "message.output_text.logprobs"
# What may be included and is there anyway, or means nothing here.
_INCLUDED = frozenset({_LOGPROBS, "reasoning.encrypted_content"})
# Fields with another name or form in a chat.
_OWN = frozenset(
    {
        *("include", "input", "instructions", "max_output_tokens", "reasoning", "text", "tool_choice", "tools"),
        *("top_logprobs", *IGNORED, *REFUSED),
    }
)
# Fields of chats only: a response has them under other names.
_OF_CHATS = ("messages", "max_tokens", "max_completion_tokens", "response_format", "functions", "logprobs")
# Parts of a content that a chat calls "text".
_TEXTS = ("input_text", "output_text")
# Fields of an item that no message of a chat needs.
_OF_AN_ITEM = frozenset({"type", "id", "status"})


class _Text(msgspec.Struct, forbid_unknown_fields=True):
    format: dict[str, Any] | None = None
    verbosity: str | None = None


class _Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    # Summaries of the reasoning are not made: it is in the answer as it is.
    effort: str | None = None
    summary: str | None = None
    generate_summary: str | None = None


class _Body(msgspec.Struct):
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    reasoning: _Reasoning | None = None
    text: _Text | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    top_logprobs: int | None = None


def as_chat(values: dict[str, Any]) -> dict[str, Any]:
    """The body of the chat.

    Raises:
        RowError: a field or an item is not served, or has the wrong type.
    """
    body = to_struct(values, _Body)
    for name, value in values.items():
        if name in REFUSED:
            REFUSED[name].require_neutral(name, value)
    foreign = next((name for name in _OF_CHATS if values.get(name) is not None), None)
    if foreign is not None:
        raise RowError("unknown_field", f"unknown fields in the body: {foreign}")
    chat = {name: value for name, value in values.items() if name not in _OWN and name not in _OF_CHATS}
    chat["messages"] = _messages(body)
    chat["max_tokens"] = body.max_output_tokens
    text, reasoning = body.text or _Text(), body.reasoning or _Reasoning()
    chat["response_format"] = _response_format(text.format)
    chat["verbosity"] = text.verbosity
    chat["reasoning_effort"] = reasoning.effort
    chat["tools"] = [_tool(tool) for tool in body.tools or ()]
    chat["tool_choice"] = _tool_choice(body.tool_choice)
    _add_logprobs(chat, body)
    return chat


def _messages(body: _Body) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [] if not body.instructions else [{"role": "system", "content": body.instructions}]
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}] if body.input else messages
    items = body.input or []
    for number, item in enumerate(items):
        message = _message(item, f"input[{number}]")
        if message is None:
            continue
        last = messages[-1] if messages else {}
        if "tool_calls" in message and last.get("role") == "assistant":
            # Calls of one turn are items of their own.
            messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), *message["tool_calls"]]}
        else:
            messages.append(message)
    return messages


def _message(item: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """An item as a message; None for reasoning, which chat templates leave out of earlier turns."""
    match item.get("type") or "message":
        case "message":
            if not isinstance(item.get("role"), str):
                raise RowError("invalid_field", f"{where}: role is missing")
            return {**_others(item), "content": _content(item.get("content"), f"{where}.content")}
        case "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            own = {"id": item.get("call_id"), "type": "function", "function": function}
            call = {**_others(item, "call_id", "name", "arguments"), **own}
            return {"role": "assistant", "content": None, "tool_calls": [call]}
        case "function_call_output":
            answer = {
                "role": "tool",
                "tool_call_id": item.get("call_id"),
                "content": _content(item.get("output"), f"{where}.output"),
            }
            return {**_others(item, "call_id", "output"), **answer}
        case "reasoning":
            return None
        case kind:
            raise RowError("invalid_messages", f"{where}: items of type {kind} are not supported")


def _others(item: Mapping[str, Any], *own: str) -> dict[str, Any]:
    """What else an item has; a chat template may read it."""
    return {n: v for n, v in item.items() if v is not None and n not in _OF_AN_ITEM and n not in own}


def _content(content: Any, where: str) -> str | list[Any]:
    """One text, or parts as of a chat if there are images among them."""
    if isinstance(content, str):
        return content
    parts = [
        {**part, "type": "text"} if isinstance(part, dict) and part.get("type") in _TEXTS else part
        for part in (content if isinstance(content, list) else [content])
    ]
    if any(isinstance(part, dict) and part.get("type") == "input_image" for part in parts):
        return parts
    return joined_text(parts, where)


def _response_format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: given[name] for name in given if name != "type"}}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        raise RowError("unsupported_field", f"tools of type {kind} are not supported: only functions are")
    return {"type": "function", "function": {n: v for n, v in tool.items() if n != "type" and v is not None}}


def _tool_choice(given: str | dict[str, Any] | None) -> Any:
    if isinstance(given, dict) and given.get("type") == "function":
        return {"type": "function", "function": {name: value for name, value in given.items() if name != "type"}}
    return given


def _add_logprobs(chat: dict[str, Any], body: _Body) -> None:
    unknown = [each for each in body.include or () if each not in _INCLUDED]
    if unknown:
        raise RowError("unsupported_field", f"include: {unknown[0]} is not supported")
    if body.top_logprobs or _LOGPROBS in (body.include or ()):
        chat |= {"logprobs": True, "top_logprobs": body.top_logprobs or 0}
