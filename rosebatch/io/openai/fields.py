"""Which fields of a body are served, which change nothing, and which are refused.

Fields follow the public API reference. Other servers' further fields (``top_k``, ``min_p``, ``stop_token_ids``,
``structured_outputs`` and the like) are served too. No field is ignored silently: a line fails if it has an unsupported
field that would change the answer.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from rosebatch.errors import RowError
from rosebatch.io.fields import (
    RequestFields,
    given_sampling,
    prompt_options,
    sampling_params,
    split_prompt_only,
    to_struct,
    with_defaults,
)
from rosebatch.sampling_params import MOST_TOKENS

BodyT = TypeVar("BodyT", bound=msgspec.Struct)

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


class GenerationBody(RequestFields):
    """The known fields of bodies that ask for text."""

    model: str | None = None
    max_completion_tokens: int | None = None


def checked(values: dict[str, Any], kind: type[BodyT]) -> BodyT:
    """A body as a struct of typed fields.

    Raises:
        RowError: a field is unknown, is unsupported, or has the wrong type.
    """
    body = to_struct(values, kind)
    unknown = set(values) - set(kind.__struct_fields__) - set(_NEUTRAL) - _WITHOUT_EFFECT
    if unknown:
        raise RowError("unknown_field", f"unknown fields in the body: {', '.join(sorted(unknown))}")
    for name, without_effect in _NEUTRAL.items():
        if values.get(name) is not None and values[name] not in without_effect:
            raise RowError("unsupported_field", f"{name} is not supported: remove it")
    return body


def generation_fields(
    body: GenerationBody, values: Mapping[str, Any], defaults: Mapping[str, Any], *, chat: bool
) -> dict[str, Any]:
    """The fields of a row that say how its text is generated.

    Args:
        body: the checked body.
        values: the body as decoded from JSON.
        defaults: the run's sampling fields. They replace the API's own defaults.
        chat: whether the prompt is a chat.

    Raises:
        RowError: a value is impossible.
    """
    own = given_sampling(body, values)
    if body.max_completion_tokens is not None:
        own["max_tokens"] = body.max_completion_tokens
    if body.seed is not None:
        # The API allows negative seeds.
        own["seed"] = body.seed % 2**64
    sampling = with_defaults(own, {**_DEFAULTS, **defaults})
    if body.echo and sampling.get("logprobs") is not None:
        sampling.setdefault("prompt_logprobs", sampling["logprobs"])
    sampling, prompt_only = split_prompt_only(sampling, echo=bool(body.echo))
    return {
        "sampling": sampling_params(sampling),
        "prompt_only": prompt_only,
        "options": prompt_options(body, values, chat=chat),
    }
