"""Sampling fields of a request: checked, with defaults, as the parameters of the engine."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import msgspec

from rosebatch.core.errors import RowError
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.structured_outputs import GrammarSpec, as_json, grammars_of
from rosebatch.io.fields import SAMPLING_FIELDS, ResponseFormat, SamplingFields, StructuredOutputs, to_struct

_GRAMMAR_FIELDS = ("response_format", "structured_outputs")
_OUTPUTS_BY_KIND = {"json_schema": "json", "lark": "grammar"}
_LOGPROB_FIELDS = ("logprobs", "top_logprobs")
_MAX_CACHED = 1024
_LONGEST_CACHED = 4096


def given_sampling(line: SamplingFields, values: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling fields that a line gives.

    Args:
        line: the checked line.
        values: the line as decoded from JSON.
    """
    if SAMPLING_FIELDS.isdisjoint(values):
        return {}
    return {name: value for name in values if name in SAMPLING_FIELDS and (value := getattr(line, name)) is not None}


def with_defaults(own: Mapping[str, Any], defaults: Mapping[str, Any]) -> Mapping[str, Any]:
    """A line's sampling fields, and the defaults for those that it does not give.

    The fields about grammars are one group, those about log-probabilities another. A line that gives one field of a
    group gets no default for the rest of that group.
    """
    if not own:
        return defaults
    for together in (_GRAMMAR_FIELDS, _LOGPROB_FIELDS):
        if not own.keys().isdisjoint(together):
            defaults = {name: value for name, value in defaults.items() if name not in together}
    return {**defaults, **own}


def split_prompt_only(sampling: Mapping[str, Any], *, echo: bool) -> tuple[Mapping[str, Any], bool]:
    """Sampling fields that the engine can serve, and whether the completion is to be dropped.

    A row may have 0 ``max_tokens`` where the prompt is echoed or scored. The engine generates at least one token, so
    such a row generates one and drops it.
    """
    if sampling.get("max_tokens") != 0 or not (echo or sampling.get("prompt_logprobs") is not None):
        return sampling, False
    return {**sampling, "max_tokens": 1}, True


def sampling_params(given: Mapping[str, Any]) -> SamplingParams:
    """Sampling parameters from fields as users write them: one stop string or several, ``top_k`` -1 for all.

    Raises:
        RowError: a value is impossible.
    """
    if not _MAY_BE_LONG.isdisjoint(given) and _is_long(given):
        return _params(given)
    try:
        # Most lines of a file give the same fields. With types: logprobs true and 1 are equal but mean two things.
        return _cached_params(tuple(given.items()), tuple(map(type, given.values())))
    except TypeError:
        # A value that cannot be hashed: a list, a grammar.
        return _params_by_json(given)


@lru_cache(_MAX_CACHED)
def _cached_params(given: tuple[tuple[str, Any], ...], types: tuple[type, ...]) -> SamplingParams:
    return _params(dict(given))


_MAY_BE_LONG = frozenset({"stop", "stop_token_ids", "bad_words", "allowed_token_ids"})


def _is_long(given: Mapping[str, Any]) -> bool:
    """Whether the fields are too long to be remembered: a thousand of them would fill the memory."""
    ids = [*(given.get("stop_token_ids") or ()), *(given.get("allowed_token_ids") or ())]
    stop = given.get("stop") or ()
    words = [*((stop,) if isinstance(stop, str) else stop), *(given.get("bad_words") or ())]
    return len(ids) > _LONGEST_CACHED or sum(map(len, words)) > _LONGEST_CACHED


_BY_JSON: dict[bytes, SamplingParams] = {}


def _params_by_json(given: Mapping[str, Any]) -> SamplingParams:
    key = msgspec.json.encode(given)
    params = _BY_JSON.get(key)
    if params is None:
        params = _params(given)
        if len(key) <= _LONGEST_CACHED:
            if len(_BY_JSON) == _MAX_CACHED:
                _BY_JSON.clear()
            _BY_JSON[key] = params
    return params


def _params(given: Mapping[str, Any]) -> SamplingParams:
    values = dict(given)
    if isinstance(values.get("stop"), str):
        values["stop"] = (values["stop"],)
    if values.get("top_k") == -1:
        values["top_k"] = 0
    values["logprobs"] = _logprobs(values.get("logprobs"), values.pop("top_logprobs", None))
    # A row's are structs already, the defaults of a run come as plain values.
    plain = {name: value for name in _GRAMMAR_FIELDS if isinstance(value := values.get(name), dict)}
    if plain:
        line = to_struct(plain, SamplingFields)
        values |= {name: getattr(line, name) for name in plain}
    values["grammar"] = _grammar(*(values.pop(name, None) for name in _GRAMMAR_FIELDS))
    try:
        return SamplingParams(**values)
    except ValueError as error:
        raise RowError("invalid_sampling", str(error)) from None


def fields_of(params: SamplingParams) -> dict[str, Any]:
    """The fields of a line that mean these sampling parameters, as plain values; defaults are left out.

    Raises:
        ValueError: the choices of a grammar are not JSON.
    """
    given = params.given()
    if params.logit_bias:
        given["logit_bias"] = {str(token_id): bias for token_id, bias in params.logit_bias}
    spec = given.pop("grammar", None)
    if spec is not None:
        value: Any = spec.source
        if spec.kind == "choice":
            value = json.loads(spec.source)
        elif spec.kind == "json_object":
            value = True
        given["structured_outputs"] = {_OUTPUTS_BY_KIND.get(spec.kind, spec.kind): value}
    return given


def _logprobs(logprobs: bool | int | None, top_logprobs: int | None) -> int | None:
    """The number of likeliest tokens to report, or None for no report.

    Completions give the number itself; chats say whether to report, and give the number apart.
    """
    if type(logprobs) is int:
        if top_logprobs is not None:
            raise RowError("invalid_sampling", "top_logprobs needs logprobs: true, but logprobs is a number")
        return logprobs
    if top_logprobs and not logprobs:
        raise RowError("invalid_sampling", "top_logprobs needs logprobs: true")
    return (top_logprobs or 0) if logprobs else None


def _grammar(response_format: ResponseFormat | None, structured: StructuredOutputs | None) -> GrammarSpec | None:
    specs = [] if response_format is None else _of_format(response_format)
    if structured is not None:
        specs += grammars_of(structured)
    if len(specs) > 1:
        raise RowError("invalid_field", f"an answer can have one grammar, but {len(specs)} are given: keep one")
    return specs[0] if specs else None


def _of_format(given: ResponseFormat) -> list[GrammarSpec]:
    """The grammar of a response format; several if it has several schemas."""
    wrapped = None if given.json_schema is None else given.json_schema.schema
    schemas = [schema for schema in (wrapped, given.schema) if schema is not None]
    if given.type == "text":
        if any(schemas):
            raise RowError("invalid_field", "response_format of type text has a schema: type json_schema keeps to it")
        return []
    if given.type == "json_schema" and not schemas:
        raise RowError("invalid_field", "response_format of type json_schema needs json_schema.schema")
    if given.type == "json_object":
        if not schemas:
            return [GrammarSpec("json_object")]
        schemas = [_of_object(schema) for schema in schemas]
    return [GrammarSpec("json_schema", as_json(schema)) for schema in schemas]


def _of_object(schema: dict[str, Any] | bool) -> dict[str, Any] | bool:
    """A schema that takes objects only, unless it says what else."""
    return {"type": "object", **({} if schema is True else schema)} if schema is not False else False
