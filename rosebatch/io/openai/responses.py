"""``/v1/responses``: the answer as items."""

from collections.abc import Mapping
from typing import Any

from rosebatch.core.errors import RowError
from rosebatch.io.images.messages import messages_with_images
from rosebatch.io.openai.endpoint import Endpoint, ParsedBody, has_any, scored
from rosebatch.io.openai.fields import GenerationBody, checked, generation_fields, ignored_fields
from rosebatch.io.openai.responses_request import IGNORED, as_chat
from rosebatch.io.results import Choice, Result
from rosebatch.io.tools import call_fields

# Fields of its request that a response repeats.
_ECHOED = ("instructions", "max_output_tokens", "max_tool_calls", "metadata", "reasoning", "top_logprobs", "user")
_REQUEST = "request"
# Fields that no other endpoint with ``input`` has.
_OWN = ("instructions", "max_output_tokens", "reasoning", "temperature", "text", "tools", "top_p")


def _parse(values: dict[str, Any], defaults: Mapping[str, Any]) -> ParsedBody:
    chat = as_chat(values)
    body = checked(chat, GenerationBody)
    fields = generation_fields(body, chat, defaults, chat=True)
    sampling = fields["sampling"]
    if sampling.n != 1:
        raise RowError("invalid_field", "n must be 1: a response is one answer")
    if not chat["messages"]:
        raise RowError("missing_prompt", "input is missing or empty")
    fields["messages"], fields["images"] = messages_with_images(chat["messages"])
    fields["ignored"] = (*ignored_fields(chat), *(name for name in IGNORED if values.get(name) is not None))
    echoed = {name: value for name in _ECHOED if (value := values.get(name)) is not None}
    # As integers, whatever the request wrote.
    numbers = {"max_output_tokens": body.max_tokens, "top_logprobs": body.top_logprobs}
    text = {"format": {"type": "text"}, **{k: v for k, v in (values.get("text") or {}).items() if v is not None}}
    request = {
        **dict.fromkeys(_ECHOED),
        **echoed,
        **numbers,
        "parallel_tool_calls": values.get("parallel_tool_calls") is not False,
        "temperature": sampling.temperature,
        "text": text,
        "tool_choice": values.get("tool_choice") or "auto",
        "tools": values.get("tools") or [],
        "top_p": sampling.top_p,
    }
    return ParsedBody(fields, {_REQUEST: request})


def _body(result: Result, model: str, created: int) -> dict[str, Any]:
    (choice,) = result.choices
    whole = choice.finish_reason != "length"
    return {
        "id": f"resp_{result.row.index}",
        "object": "response",
        "created_at": created,
        "status": "completed" if whole else "incomplete",
        "error": None,
        "incomplete_details": None if whole else {"reason": "max_output_tokens"},
        "model": model,
        "output": _items(choice, result.row.index, "completed" if whole else "incomplete"),
        "previous_response_id": None,
        "truncation": "disabled",
        **result.row.metadata[_REQUEST],
        "usage": {
            "input_tokens": result.prompt_tokens,
            "input_tokens_details": {"cached_tokens": result.cached_tokens, "cache_write_tokens": 0},
            "output_tokens": result.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": choice.reasoning_tokens},
            "total_tokens": result.prompt_tokens + result.completion_tokens,
        },
    }


def _items(choice: Choice, index: int, status: str) -> list[dict[str, Any]]:
    """Reasoning, message and calls, as far as there are any. The last of them is the one that was cut."""
    items: list[dict[str, Any]] = []
    if choice.reasoning is not None:
        content = [{"type": "reasoning_text", "text": choice.reasoning}]
        items.append({"id": f"rs_{index}", "type": "reasoning", "summary": [], "content": content})
    calls = call_fields(choice.tool_calls, index, 0)
    if choice.text or not (calls or items):
        logprobs = None if choice.logprobs is None else choice.logprobs.json(scored)
        text: dict[str, Any] = {
            "type": "output_text",
            "text": choice.text or "",
            "annotations": [],
            "logprobs": logprobs,
        }
        items.append({"id": f"msg_{index}", "type": "message", "role": "assistant", "content": [text]})
    for number, call in enumerate(calls):
        own = {"id": f"fc_{index}_{number}", "type": "function_call", "call_id": call["id"]}
        items.append({**own, **call["function"]})
    return [{**item, "status": status if item is items[-1] else "completed"} for item in items]


def _fits(body: Mapping[str, Any]) -> bool:
    items = body.get("input")
    return has_any(body, _OWN) or (isinstance(items, list) and any(isinstance(each, dict) for each in items))


RESPONSES = Endpoint("/v1/responses", _parse, _body, _fits, "a response")
