"""``/v1/chat/completions``."""

from collections.abc import Mapping
from typing import Any

from rosebatch.core.errors import RowError
from rosebatch.io.images.messages import messages_with_images
from rosebatch.io.openai.endpoint import Endpoint, ParsedBody, additions, completion_body, has_any, scored
from rosebatch.io.openai.fields import GenerationBody, checked, generation_fields
from rosebatch.io.openai.legacy_functions import as_tools, message_as_tools
from rosebatch.io.results import Choice, Result
from rosebatch.io.tools import call_fields

# The key in the metadata: whether calls are written as functions.
_FUNCTIONS = "functions"


class _Body(GenerationBody):
    # A field of completions; it has an error of its own.
    prompt: Any = None


def _parse(values: dict[str, Any], defaults: Mapping[str, Any]) -> ParsedBody:
    values, has_functions = as_tools(values)
    body = checked(values, _Body)
    if body.prompt is not None:
        raise RowError("invalid_field", f"prompt cannot be used with {CHAT.url}")
    if type(body.logprobs) is int and body.logprobs:
        raise RowError("invalid_field", "logprobs of a chat must be true or false; top_logprobs says how many")
    fields = generation_fields(body, values, defaults, chat=True)
    if not body.messages:
        raise RowError("missing_prompt", "messages is missing or empty")
    messages, images = messages_with_images(values["messages"])
    fields = {**fields, "messages": [message_as_tools(message) for message in messages], "images": images}
    return ParsedBody(fields, {_FUNCTIONS: True} if has_functions else {})


def _body(result: Result, model: str, created: int) -> dict[str, Any]:
    choices = [_choice(choice, result, index) for index, choice in enumerate(result.choices)]
    return completion_body(result, model, created, choices, prefix="chatcmpl", kind="chat.completion")


def _choice(choice: Choice, result: Result, index: int) -> dict[str, Any]:
    logprobs = None
    if choice.logprobs is not None:
        logprobs = {"content": choice.logprobs.json(scored), "refusal": None}
    message: dict[str, Any] = {"role": "assistant", "content": choice.text, "refusal": None}
    if choice.reasoning is not None:
        message["reasoning_content"] = choice.reasoning
    finish_reason, calls = choice.finish_reason, call_fields(choice.tool_calls, result.row.index, index)
    if calls:
        message["content"] = choice.text or None
    if calls and _FUNCTIONS in result.row.metadata:
        message["function_call"] = calls[0]["function"]
        finish_reason = "function_call" if finish_reason == "tool_calls" else finish_reason
    elif calls:
        message["tool_calls"] = calls
    return {"message": message, "logprobs": logprobs, "finish_reason": finish_reason, **additions(choice)}


CHAT = Endpoint("/v1/chat/completions", _parse, _body, lambda body: has_any(body, ["messages"]))
