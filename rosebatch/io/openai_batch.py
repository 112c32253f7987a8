"""The batch files of OpenAI's API: one request a line, and the lines that answer them.

Shapes as in the public API reference of batches, chat completions and completions; fields beyond it (``top_k``,
``min_p``, ``stop_token_ids``, ``ignore_eos``) are those that other servers take. Nothing is ignored silently: a
field that would change the answer and is not served is the line's error.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgspec

from rosebatch.errors import RowError
from rosebatch.io.rows import (
    UNSUPPORTED,
    Answer,
    FailedRow,
    PromptRow,
    RequestFields,
    convert,
    given_sampling,
    plain_message,
    prompt_options,
    require_supported,
    sampling_params,
)

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# As the API: not greedy, and as long as the model can go on.
_DEFAULTS = {"temperature": 1.0, "max_tokens": 2**31 - 1}
# Fields without a meaning for a local run.
_WITHOUT_EFFECT = {
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "user",
}
_NEUTRAL: dict[str, tuple[Any, ...]] = UNSUPPORTED | {
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "stream": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}


class _Line(msgspec.Struct):
    custom_id: str
    body: dict[str, Any]
    method: Literal["POST"] = "POST"
    url: str | None = None


class _Body(RequestFields):
    model: str | None = None
    prompt: str | list[Any] | None = None
    max_completion_tokens: int | None = None


def is_request(values: object) -> bool:
    """Whether a decoded line is of such a file."""
    return isinstance(values, dict) and "custom_id" in values and "body" in values


def parse_request(values: object, *, index: int, where: str, defaults: Mapping[str, Any]) -> PromptRow | FailedRow:
    """Check one line; see ``rosebatch.io.rows.parse_row``.

    Args:
        values: the decoded line.
        index: of the row.
        where: for error messages.
        defaults: sampling fields for where the body is silent; they win over the API's own.
    """
    metadata = {"custom_id": values.get("custom_id") if isinstance(values, dict) else None}
    try:
        line = convert(values, _Line)
        body = convert(line.body, _Body)
        url = line.url or (_COMPLETIONS if body.messages is None else _CHAT)
        if url not in (_CHAT, _COMPLETIONS):
            raise RowError("unsupported_url", f"url is {url}; served are {_CHAT} and {_COMPLETIONS}")
        unknown = set(line.body) - set(_Body.__struct_fields__) - set(_NEUTRAL) - _WITHOUT_EFFECT
        if unknown:
            raise RowError("unknown_field", f"unknown in the body: {', '.join(sorted(unknown))}")
        other = "prompt" if url == _CHAT else "messages"
        if getattr(body, other) is not None:
            raise RowError("invalid_field", f"{other} has no meaning for {url}")
        # To completions, logprobs 0 is a request for those of the chosen tokens.
        require_supported(line.body, _NEUTRAL if url == _CHAT else {**_NEUTRAL, "logprobs": ()})
        own = given_sampling(body)
        if body.max_completion_tokens is not None:
            own["max_tokens"] = body.max_completion_tokens
        if body.seed is not None:
            # The API's may be negative.
            own["seed"] = body.seed % 2**64
        text, token_ids = (None, None) if url == _CHAT else _prompt(body.prompt)
        return PromptRow(
            index=index,
            where=where,
            metadata={"custom_id": line.custom_id, "url": url},
            sampling=sampling_params({**_DEFAULTS, **defaults, **own}),
            has_seed=body.seed is not None,
            id=line.custom_id,
            options=prompt_options(body, chat=url == _CHAT),
            prompt=text,
            messages=_messages(line.body, body) if url == _CHAT else None,
            prompt_token_ids=token_ids,
        )
    except RowError as error:
        return FailedRow(index=index, where=where, metadata=metadata, error=error)


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The lines of output and error file.

    Attributes:
        model: its name, in every answer.
        created: seconds since 1970, in every answer.
    """

    model: str
    created: int

    def result(self, answer: Answer) -> dict[str, Any]:
        """The line of a request that was served."""
        chat = answer.metadata["url"] == _CHAT
        choice: dict[str, Any] = {"index": 0}
        if chat:
            choice["message"] = {"role": "assistant", "content": answer.text, "refusal": None}
        else:
            choice["text"] = answer.text or ""
        choice |= {"logprobs": None, "finish_reason": answer.finish_reason}
        if answer.token_ids is not None:
            choice["token_ids"] = answer.token_ids
        body = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{answer.index}",
            "object": "chat.completion" if chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
            "usage": {
                "prompt_tokens": answer.prompt_tokens,
                "completion_tokens": answer.completion_tokens,
                "total_tokens": answer.prompt_tokens + answer.completion_tokens,
                "prompt_tokens_details": {"cached_tokens": answer.cached_tokens},
            },
        }
        response = {"status_code": 200, "request_id": f"req_{answer.index}", "body": body}
        return _line(answer.index, answer.metadata["custom_id"], response, None)

    def failure(self, row: FailedRow) -> dict[str, Any]:
        """The line of one that was not."""
        error = {"code": row.error.code, "message": f"{row.where}: {row.error.message}"}
        return _line(row.index, row.metadata.get("custom_id"), None, error)


def _line(index: int, custom_id: Any, response: Any, error: Any) -> dict[str, Any]:
    return {"id": f"batch_req_{index}", "custom_id": custom_id, "response": response, "error": error}


def _messages(values: Mapping[str, Any], body: _Body) -> list[dict[str, Any]]:
    if not body.messages:
        raise RowError("missing_prompt", "messages is missing or empty")
    return [plain_message(message) for message in values["messages"]]


def _prompt(prompt: str | list[Any] | None) -> tuple[str | None, tuple[int, ...] | None]:
    """The prompt as text or as token ids; a list of one prompt is that prompt."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if not prompt:
        raise RowError("missing_prompt", "prompt is missing or empty")
    if isinstance(prompt, str):
        return prompt, None
    if not all(type(token) is int for token in prompt):
        raise RowError("invalid_field", "prompt must be a text, a list of token ids, or a list of one of these")
    return None, tuple(prompt)
