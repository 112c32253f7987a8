"""An endpoint of the API: how a body is parsed, how an answer is written, and what several of them share."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rosebatch.io.results import Choice, Result, scored_token
from rosebatch.io.scored_tokens import ScoredToken


class ParsedBody(NamedTuple):
    """A checked body.

    Attributes:
        fields: of ``rosebatch.io.rows.Row``: the prompt, its sampling and options.
        metadata: what ``Endpoint.body`` needs of the request.
    """

    fields: Mapping[str, Any]
    metadata: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One URL of the API.

    Attributes:
        url: as a line names it.
        parse: the checked body, from the decoded one and the run's sampling fields. Raises RowError.
        body: the answer's body, from the result, the model's name and the time in seconds since 1970.
        fits: whether a body without a URL is for it, if it is for no earlier one of the table.
        of_input: what it makes of ``input``, if it reads that.
    """

    url: str
    parse: Callable[[dict[str, Any], Mapping[str, Any]], ParsedBody]
    body: Callable[[Result, str, int], dict[str, Any]]
    fits: Callable[[Mapping[str, Any]], bool]
    of_input: str | None = None


def has_any(body: Mapping[str, Any], names: Iterable[str]) -> bool:
    """Whether a body has one of these fields; ``null`` is none."""
    return any(body.get(name) is not None for name in names)


def completion_body(
    result: Result, model: str, created: int, choices: Sequence[Mapping[str, Any]], *, prefix: str, kind: str
) -> dict[str, Any]:
    """The body of an answer with ``choices``; its id begins with ``prefix``, and ``kind`` says what it is."""
    usage: dict[str, Any] = {
        "prompt_tokens": result.prompt_tokens,
        "completion_tokens": result.completion_tokens,
        "total_tokens": result.prompt_tokens + result.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": result.cached_tokens},
    }
    if reasoning := sum(choice.reasoning_tokens for choice in result.choices):
        usage["completion_tokens_details"] = {"reasoning_tokens": reasoning}
    return {
        "id": f"{prefix}-{result.row.index}",
        "object": kind,
        "created": created,
        "model": model,
        "choices": [{"index": index, **choice} for index, choice in enumerate(choices)],
        "usage": usage,
    }


def scored(token: ScoredToken) -> dict[str, Any]:
    """A token with its log-probability."""
    return {"token": token.label, "logprob": token.logprob, "bytes": list(token.raw or b"")}


def additions(choice: Choice) -> dict[str, Any]:
    """Fields that the API does not have, under the names that other servers use."""
    found: dict[str, Any] = {} if choice.token_ids is None else {"token_ids": choice.token_ids}
    if choice.prompt_logprobs is not None and not (choice.echo and choice.logprobs is not None):
        found["prompt_logprobs"] = choice.prompt_logprobs.json(scored_token)
    return found
