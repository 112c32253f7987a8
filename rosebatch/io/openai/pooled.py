"""Prompts and pairs that a head classifies, scores or ranks: fields and answers of vLLM's server."""

from collections.abc import Mapping
from dataclasses import replace
from itertools import chain
from typing import Any, Literal

import msgspec

from rosebatch.core.errors import RowError
from rosebatch.core.pooling_params import EncodingFormat, PoolingParams
from rosebatch.core.sampling_params import GREEDY
from rosebatch.io.fields import Message, prompt_options
from rosebatch.io.images.messages import messages_with_images
from rosebatch.io.openai.completions import prompts_of
from rosebatch.io.openai.endpoint import Endpoint, ParsedBody, has_any
from rosebatch.io.openai.fields import checked, ignored_fields
from rosebatch.io.pairs import pairs_of
from rosebatch.io.results import Result
from rosebatch.io.tasks.classify import CLASSIFY, likeliest
from rosebatch.io.tasks.embed import encoded, pooling_params
from rosebatch.io.tasks.score import SCORE

# What answers need of requests: to rerank, and to pool.
_DOCUMENTS, _TOP = "documents", "top_n"
_FORMAT, _TASK = "encoding_format", "task"
# vLLM's names of the texts of pairs.
_PAIRS = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))
_RERANK = ("/v1/rerank", "/v2/rerank")
_Texts = str | tuple[str, ...] | None


class _Body(msgspec.Struct):
    model: str | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None


class _Classify(_Body):
    input: str | list[Any] | None = None
    messages: list[Message] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class _Pooling(_Classify):
    task: Literal["embed", "classify", "token_classify"] | None = None
    dimensions: int | None = None
    encoding_format: EncodingFormat | None = None
    embed_dtype: Literal["float32"] | None = None
    endianness: Literal["native", "little"] | None = None


class _Score(_Body):
    text_1: _Texts = None
    text_2: _Texts = None
    queries: _Texts = None
    documents: _Texts = None
    items: _Texts = None
    data_1: _Texts = None
    data_2: _Texts = None


class _Document(msgspec.Struct, forbid_unknown_fields=True):
    text: str


class _Rerank(_Body):
    query: str | None = None
    documents: str | tuple[str | _Document, ...] = ()
    top_n: int | None = None
    return_documents: bool | None = None


def _parse_classify(values: dict[str, Any], defaults: Mapping[str, Any]) -> ParsedBody:
    body = checked(values, _Classify)
    return ParsedBody(_of_prompts(values, body, _activated(CLASSIFY, body)))


def _parse_pooling(values: dict[str, Any], defaults: Mapping[str, Any]) -> ParsedBody:
    body = checked(values, _Pooling)
    if body.task == "embed":
        pooling = replace(pooling_params(body.dimensions), normalize=body.use_activation)
    elif body.dimensions is not None:
        raise RowError("invalid_field", "dimensions are of vectors: give task embed")
    else:
        pooling = _activated(CLASSIFY, body)
    return ParsedBody(_of_prompts(values, body, pooling), {_FORMAT: body.encoding_format or "float", _TASK: body.task})


def _activated(pooling: PoolingParams, body: _Body) -> PoolingParams:
    """The parameters, without the model's activation where the body asks for none."""
    return replace(pooling, activation="none") if body.use_activation is False else pooling


def _of_prompts(values: dict[str, Any], body: _Classify, pooling: PoolingParams) -> dict[str, Any]:
    """The fields of a row of inputs, or of a chat."""
    own: dict[str, Any] = {"pooling": pooling}
    if body.messages is None:
        own["prompts"] = prompts_of(body.input, "input")
    elif body.input is not None or not body.messages:
        raise RowError("missing_prompt", "expected one of input and messages")
    else:
        own["messages"], own["images"] = messages_with_images(values["messages"])
    body.add_generation_prompt = bool(body.add_generation_prompt)
    given = {"add_generation_prompt": False, **values} if body.messages is not None else values
    options = prompt_options(body, given, chat=body.messages is not None)
    return {"sampling": GREEDY, "options": options, "ignored": ignored_fields(values), **own}


def _parse_score(values: dict[str, Any], defaults: Mapping[str, Any]) -> ParsedBody:
    body = checked(values, _Score)
    given = tuple(name for name in dict.fromkeys(chain(*_PAIRS)) if getattr(body, name) is not None)
    if given not in _PAIRS:
        ways = " or ".join(" and ".join(names) for names in _PAIRS)
        raise RowError("missing_prompt", f"expected {ways}; got {' and '.join(given) or 'none'}")
    first, second = (getattr(body, name) for name in given)
    return ParsedBody(_of_pairs(values, body, pairs_of(first, second, names=given)))


def _parse_rerank(values: dict[str, Any], defaults: Mapping[str, Any]) -> ParsedBody:
    body = checked(values, _Rerank)
    if body.query is None or not body.documents:
        raise RowError("missing_prompt", "expected query and documents")
    if body.top_n is not None and body.top_n < 0:
        raise RowError("invalid_field", "top_n must be >= 0")
    given = (body.documents,) if isinstance(body.documents, str) else body.documents
    texts = [each if isinstance(each, str) else each.text for each in given]
    pairs = pairs_of(body.query, texts, names=("query", "documents"))
    returned = None if body.return_documents is False else texts
    return ParsedBody(_of_pairs(values, body, pairs), {_DOCUMENTS: returned, _TOP: body.top_n})


def _of_pairs(values: Mapping[str, Any], body: _Body, pairs: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """The fields of a row of pairs."""
    options = prompt_options(body, values, chat=False)
    own = {"pairs": pairs, "pooling": _activated(SCORE, body)}
    return {"sampling": GREEDY, "options": options, "ignored": ignored_fields(values), **own}


def _classes(result: Result, model: str, created: int) -> dict[str, Any]:
    data = [
        {"index": index, "label": likeliest(result, index), "probs": numbers.tolist(), "num_classes": len(numbers)}
        for index, numbers in enumerate(result.pooled)
    ]
    return _list(result, model, created, "classify", data)


def _pooled(result: Result, model: str, created: int) -> dict[str, Any]:
    """What a head gives a prompt or its tokens, or vectors."""
    task, form = (result.row.metadata[name] for name in (_TASK, _FORMAT))
    if task is not None and (task == "token_classify") != bool(result.tokens):
        what = "tokens" if result.tokens else "whole prompts"
        raise RowError("unsupported_pooling", f"task {task}: the model's head is for {what}")
    found: list[Any] = [encoded(each, form) for each in result.pooled]
    if result.tokens and form == "float":
        found = [each.numbers.tolist() for each in result.tokens]
    data = [{"index": index, "object": "pooling", "data": each} for index, each in enumerate(found)]
    return _list(result, model, created, "pool", data)


def _scores(result: Result, model: str, created: int) -> dict[str, Any]:
    data = [{"index": index, "object": "score", "score": score} for index, (score,) in enumerate(result.pooled)]
    return _list(result, model, created, "score", data)


def _list(result: Result, model: str, created: int, kind: str, data: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "id": f"{kind}-{result.row.index}",
        "object": "list",
        "created": created,
        "model": model,
        "data": data,
        "usage": _usage(result),
    }


def _ranks(result: Result, model: str, created: int) -> dict[str, Any]:
    """The documents, those that fit best first. With ``top_n`` of 0 or none, all of them."""
    texts, top = (result.row.metadata[name] for name in (_DOCUMENTS, _TOP))
    scores = [score for (score,) in result.pooled]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    results = [
        {"index": index, **({"document": {"text": texts[index]}} if texts else {}), "relevance_score": scores[index]}
        for index in order[: top or None]
    ]
    return {"id": f"rerank-{result.row.index}", "model": model, "usage": _usage(result), "results": results}


def _usage(result: Result) -> dict[str, int]:
    return {"prompt_tokens": result.prompt_tokens, "total_tokens": result.prompt_tokens, "completion_tokens": 0}


POOLED = (
    # A body with ``input`` alone is not told from others: such a line needs its URL.
    Endpoint("/v1/classify", _parse_classify, _classes, lambda body: False, "classes"),
    Endpoint("/v1/pooling", _parse_pooling, _pooled, lambda body: False, "what a model pools"),
    Endpoint("/v1/score", _parse_score, _scores, lambda body: has_any(body, [first for first, _ in _PAIRS])),
    # The second is Cohere's: its bodies and answers are those of the first.
    *(Endpoint(url, _parse_rerank, _ranks, lambda body: has_any(body, ["query"])) for url in _RERANK),
)
