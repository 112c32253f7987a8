"""The batch files of OpenAI's API: one request a line, and the lines that answer them.

Lines follow the public API reference of batches, chat completions and completions. Other servers' further fields
(``top_k``, ``min_p``, ``stop_token_ids``, ``structured_outputs`` and the like) are served too. No field is ignored
silently: a line fails if it has an unsupported field that would change the answer.
"""

from codecs import getincrementaldecoder
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

import msgspec

from rosebatch.errors import RowError
from rosebatch.io.fields import (
    RequestFields,
    given_sampling,
    plain_message,
    prompt_options,
    sampling_params,
    split_prompt_only,
    to_struct,
    with_defaults,
)
from rosebatch.io.results import Answer, Choice, ScoredToken, scored_tokens
from rosebatch.io.rows import FailedRow, PromptRow
from rosebatch.sampling_params import MOST_TOKENS

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# The API's defaults: sampled, and as long as the model allows.
_DEFAULTS = {"temperature": 1.0, "max_tokens": MOST_TOKENS}
# Fields that change nothing in a local run.
_WITHOUT_EFFECT = {
    "metadata",
    "parallel_tool_calls",
    "prompt_cache_key",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "store",
    "stream_options",
    "user",
}
# Unsupported fields, with the values at which they change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    "stream": (False,),
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
    """Whether a decoded line is a request of a batch file."""
    return isinstance(values, dict) and "custom_id" in values and "body" in values


def parse_request(values: object, *, index: int, where: str, defaults: Mapping[str, Any]) -> PromptRow | FailedRow:
    """Check one line; see ``rosebatch.io.rows.parse_row``.

    Args:
        values: the decoded line.
        index: of the row.
        where: the line's place, for error messages.
        defaults: sampling fields for what the body does not say. They replace the API's own defaults.
    """
    metadata = {"custom_id": values.get("custom_id") if isinstance(values, dict) else None}
    try:
        line = to_struct(values, _Line)
        body = to_struct(line.body, _Body)
        url = line.url or (_COMPLETIONS if body.messages is None else _CHAT)
        if not url.startswith("/v1"):
            # Some services leave out the /v1.
            url = f"/v1{url}"
        if url not in (_CHAT, _COMPLETIONS):
            raise RowError("unsupported_url", f"url {url} is not supported; use {_CHAT} or {_COMPLETIONS}")
        unknown = set(line.body) - set(_Body.__struct_fields__) - set(_NEUTRAL) - _WITHOUT_EFFECT
        if unknown:
            raise RowError("unknown_field", f"unknown fields in the body: {', '.join(sorted(unknown))}")
        other = "prompt" if url == _CHAT else "messages"
        if getattr(body, other) is not None:
            raise RowError("invalid_field", f"{other} cannot be used with {url}")
        _require_neutral(line.body)
        own = given_sampling(body, line.body)
        if url == _CHAT and type(body.logprobs) is int:
            raise RowError("invalid_field", "logprobs of a chat must be true or false; top_logprobs says how many")
        if url == _COMPLETIONS and type(body.logprobs) is bool:
            raise RowError("invalid_field", f"logprobs of {url} must be the number of likeliest tokens")
        if body.max_completion_tokens is not None:
            own["max_tokens"] = body.max_completion_tokens
        if body.seed is not None:
            # The API allows negative seeds.
            own["seed"] = body.seed % 2**64
        prompts = () if url == _CHAT else _prompts(body.prompt)
        one = prompts[0] if len(prompts) == 1 else None
        if url == _COMPLETIONS and body.suffix and not isinstance(one, str):
            raise RowError("invalid_field", "suffix needs one prompt, given as text")
        sampling = with_defaults(own, {**_DEFAULTS, **defaults})
        if body.echo and sampling.get("logprobs") is not None:
            sampling.setdefault("prompt_logprobs", sampling["logprobs"])
        sampling, prompt_only = split_prompt_only(sampling, echo=bool(body.echo))
        return PromptRow(
            index=index,
            where=where,
            metadata={"custom_id": line.custom_id, "url": url},
            sampling=sampling_params(sampling),
            prompt_only=prompt_only,
            id=line.custom_id,
            options=prompt_options(body, line.body, chat=url == _CHAT),
            prompt=one if isinstance(one, str) else None,
            messages=_messages(line.body, body) if url == _CHAT else None,
            prompt_token_ids=one if isinstance(one, tuple) else None,
            prompts=prompts if one is None else (),
        )
    except RowError as error:
        return FailedRow(index=index, where=where, metadata=metadata, error=error)


@dataclass(frozen=True, slots=True)
class BatchShape:
    """The lines of the output file and the error file.

    Attributes:
        model: the name in every answer.
        created: the time in every answer, in seconds since 1970.
    """

    model: str
    created: int

    def result(self, answer: Answer) -> dict[str, Any]:
        """The line of a request that was served."""
        chat = answer.metadata["url"] == _CHAT
        make = _chat_choice if chat else _text_choice
        choices = [{"index": index, **make(choice)} for index, choice in enumerate(answer.choices)]
        body = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{answer.index}",
            "object": "chat.completion" if chat else "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
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
        """The line of a request that failed."""
        error = {"code": row.error.code, "message": f"{row.where}: {row.error.message}"}
        return _line(row.index, row.metadata.get("custom_id"), None, error)


def _line(index: int, custom_id: Any, response: Any, error: Any) -> dict[str, Any]:
    return {"id": f"batch_req_{index}", "custom_id": custom_id, "response": response, "error": error}


def _messages(values: Mapping[str, Any], body: _Body) -> list[dict[str, Any]]:
    if not body.messages:
        raise RowError("missing_prompt", "messages is missing or empty")
    return [plain_message(message) for message in values["messages"]]


def _prompts(prompt: str | list[Any] | None) -> tuple[str | tuple[int, ...], ...]:
    """One prompt or several, each as text or token ids."""
    if not prompt:
        raise RowError("missing_prompt", "prompt is missing or empty")
    if isinstance(prompt, str):
        return (prompt,)
    several = prompt if all(isinstance(each, (str, list)) for each in prompt) else [prompt]
    for each in several:
        if not each:
            raise RowError("missing_prompt", "prompt is missing or empty")
        if not isinstance(each, str) and not all(type(token) is int for token in each):
            raise RowError("invalid_field", "prompt must be a text, a list of token ids, or a list of these")
    return tuple(each if isinstance(each, str) else tuple(each) for each in several)


def _require_neutral(body: Mapping[str, Any]) -> None:
    """Refuse unsupported fields unless their value changes nothing."""
    for name, without_effect in _NEUTRAL.items():
        if body.get(name) is not None and body[name] not in without_effect:
            raise RowError("unsupported_field", f"{name} is not supported: remove it")


def _chat_choice(choice: Choice) -> dict[str, Any]:
    def scored(token: ScoredToken) -> dict[str, Any]:
        return {"token": token.text, "logprob": token.logprob, "bytes": list(token.raw)}

    logprobs = None
    if choice.logprobs is not None:
        content = [{**scored(t), "top_logprobs": [scored(other) for other in t.top]} for t in choice.logprobs]
        logprobs = {"content": content, "refusal": None}
    message = {"role": "assistant", "content": choice.text, "refusal": None}
    return {"message": message, "logprobs": logprobs, "finish_reason": choice.finish_reason, **_additions(choice)}


def _text_choice(choice: Choice) -> dict[str, Any]:
    """A completion. If the prompt is echoed, its log-probabilities come first, in the same lists."""
    logprobs = None
    if choice.logprobs is not None:
        tokens = [*(choice.prompt_logprobs or [] if choice.echo else []), *choice.logprobs]
        logprobs = {
            "tokens": [token.text for token in tokens],
            "token_logprobs": [token.logprob for token in tokens],
            "top_logprobs": [_likeliest(token) for token in tokens],
            "text_offset": _offsets(tokens, choice.text or ""),
        }
    fields = {"text": choice.text or "", "logprobs": logprobs, "finish_reason": choice.finish_reason}
    return {**fields, **_additions(choice)}


def _likeliest(token: ScoredToken) -> dict[str, float] | None:
    """Log-probabilities by the tokens' texts, the token itself always included.

    If two tokens have the same text, the likelier one counts.
    """
    if token.logprob is None:
        return None
    logprobs: dict[str, float] = {}
    for each in (*token.top, token):
        if each.logprob is not None:
            logprobs.setdefault(each.text, each.logprob)
    return logprobs


def _offsets(tokens: Sequence[ScoredToken], text: str) -> list[int]:
    """The place in the text where each token begins."""
    decoder = getincrementaldecoder("utf-8")(errors="replace")
    pieces = ["" if token.special else decoder.decode(token.raw) for token in tokens]
    # Some tokenizers drop the space before a text's first word.
    shift = int("".join(pieces).startswith(" ") and not text.startswith(" "))
    return [max(0, offset - shift) for offset in accumulate(map(len, pieces[:-1]), initial=0)]


def _additions(choice: Choice) -> dict[str, Any]:
    """Fields that the API does not have, under the names that other servers use."""
    additions: dict[str, Any] = {} if choice.token_ids is None else {"token_ids": choice.token_ids}
    if choice.prompt_logprobs is not None and not (choice.echo and choice.logprobs is not None):
        additions["prompt_logprobs"] = scored_tokens(choice.prompt_logprobs)
    return additions
