"""One line of the input -> a checked row, or an error that costs this line only."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from rosebatch.errors import RowError
from rosebatch.request import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptRow:
    """A line whose shape is right: exactly one of ``prompt``, ``messages``, ``prompt_token_ids`` is set.

    Attributes:
        index: counted from 0 over the lines that are not blank.
        where: for messages to people: ``line 7``.
        metadata: the fields that are carried through to the result.
        sampling: the run's defaults overlaid with the line's own fields.
        has_seed: whether the line brings its own seed.
    """

    index: int
    where: str
    metadata: Mapping[str, Any]
    sampling: SamplingParams
    has_seed: bool
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    prompt_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FailedRow:
    """A line that becomes an error row; ``metadata`` is what could be read of it."""

    index: int
    where: str
    metadata: Mapping[str, Any]
    error: RowError


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None


class _Fields(msgspec.Struct):
    """The fields with a meaning, and their types; any other is carried through."""

    id: str | int | None = None
    prompt: str | None = None
    messages: list[_Message] | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None
    stop: str | tuple[str, ...] | None = None
    stop_token_ids: tuple[int, ...] | None = None
    ignore_eos: bool | None = None


# The fields of a result: an input field of such a name is not carried through.
RESULT_FIELDS = ("index", "text", "finish_reason", "usage", "token_ids", "error")

_PROMPT_FIELDS = ("prompt", "messages", "prompt_token_ids")
_SAMPLING_FIELDS = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "max_tokens",
    "seed",
    "stop",
    "stop_token_ids",
    "ignore_eos",
)
# Sampling fields of the field's other tools, with the values that change nothing: any other would be ignored
# silently, so it is an error.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "logprobs": (False, 0),
    "top_logprobs": (0,),
    "prompt_logprobs": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
}


def parse_row(
    values: object, *, index: int, where: str, defaults: Mapping[str, Any], keep_prompt: bool = False
) -> PromptRow | FailedRow:
    """Check one line.

    Args:
        values: the decoded line.
        index: of the row.
        where: for error messages.
        defaults: sampling fields for where the line is silent.
        keep_prompt: carry all fields through, not only those without a meaning (a table keeps its columns).
    """
    if not isinstance(values, dict):
        error = RowError("invalid_line", f"expected a JSON object, got {type(values).__name__}")
        return FailedRow(index=index, where=where, metadata={}, error=error)
    dropped = set(RESULT_FIELDS)
    if not keep_prompt:
        dropped.update(_PROMPT_FIELDS, _SAMPLING_FIELDS, _UNSUPPORTED)
    metadata = {name: value for name, value in values.items() if name not in dropped}
    try:
        fields = _check(values)
        own = {n: v for n in _SAMPLING_FIELDS if (v := getattr(fields, n)) is not None}
        return PromptRow(
            index=index,
            where=where,
            metadata=metadata,
            sampling=sampling_params({**defaults, **own}),
            has_seed="seed" in own,
            prompt=fields.prompt,
            messages=None if fields.messages is None else [_plain(m) for m in values["messages"]],
            prompt_token_ids=fields.prompt_token_ids,
        )
    except RowError as error:
        return FailedRow(index=index, where=where, metadata=metadata, error=error)


def sampling_params(fields: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters from fields as users write them: one stop string or several, ``top_k`` -1 for all.

    Raises:
        RowError: a value is impossible.
    """
    values = dict(fields)
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    if values.get("top_k") == -1:
        values["top_k"] = 0
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise RowError("invalid_sampling", str(error)) from None


def _check(values: dict[str, Any]) -> _Fields:
    try:
        fields = msgspec.convert(values, _Fields)
    except (msgspec.ValidationError, OverflowError) as error:
        raise RowError("invalid_field", str(error).replace("`$.", "`")) from None
    for name, neutral in _UNSUPPORTED.items():
        if values.get(name) is not None and values[name] not in neutral:
            raise RowError("unsupported_field", f"{name} is not supported yet")
    given = [name for name in _PROMPT_FIELDS if getattr(fields, name) is not None]
    if len(given) != 1:
        what = "none" if not given else " and ".join(given)
        raise RowError("missing_prompt", f"expected one of prompt, messages, prompt_token_ids; got {what}")
    if not getattr(fields, given[0]):
        raise RowError("empty_prompt", f"{given[0]} is empty")
    return fields


def _plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message whose content is one string: text parts are joined by line breaks."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    texts = [part["text"] for part in content if part.get("type") == "text" and isinstance(part.get("text"), str)]
    if len(texts) != len(content):
        raise RowError("invalid_messages", "message content may hold text parts only")
    return {**message, "content": "\n".join(texts)}
