"""``/v1/embeddings``."""

from collections.abc import Mapping
from typing import Any

import msgspec

from rosebatch.core.pooling_params import EncodingFormat
from rosebatch.core.sampling_params import GREEDY
from rosebatch.io.fields import prompt_options
from rosebatch.io.openai.completions import prompts_of
from rosebatch.io.openai.endpoint import Endpoint, ParsedBody, has_any
from rosebatch.io.openai.fields import checked, ignored_fields
from rosebatch.io.results import Result
from rosebatch.io.tasks.embed import encoded, pooling_params

_FORMAT = "encoding_format"
# Fields that no other endpoint with ``input`` has.
_OWN = ("dimensions", _FORMAT)


class _Body(msgspec.Struct):
    input: str | list[Any] | None = None
    model: str | None = None
    dimensions: int | None = None
    encoding_format: EncodingFormat | None = None
    truncate_prompt_tokens: int | None = None


def _parse(values: dict[str, Any], defaults: Mapping[str, Any]) -> ParsedBody:
    body = checked(values, _Body)
    fields = {
        "prompts": prompts_of(body.input, "input"),
        "sampling": GREEDY,
        "options": prompt_options(body, values, chat=False),
        "pooling": pooling_params(body.dimensions),
        "ignored": ignored_fields(values),
    }
    return ParsedBody(fields, {_FORMAT: body.encoding_format or "float"})


def _body(result: Result, model: str, created: int) -> dict[str, Any]:
    given = result.row.metadata[_FORMAT]
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": encoded(embedding, given)}
            for index, embedding in enumerate(result.pooled)
        ],
        "model": model,
        "usage": {"prompt_tokens": result.prompt_tokens, "total_tokens": result.prompt_tokens},
    }


EMBEDDINGS = Endpoint("/v1/embeddings", _parse, _body, lambda body: has_any(body, _OWN), "embeddings")
