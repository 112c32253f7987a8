"""The result of a row, and the output line that it becomes."""

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import msgspec

from rosebatch.core.request import Completion
from rosebatch.io.labelled_tokens import LabelledTokens
from rosebatch.io.rows import FailedRow, Row
from rosebatch.io.scored_tokens import ScoredToken, ScoredTokens
from rosebatch.io.tools import ToolCall, call_fields


class Choice(msgspec.Struct, frozen=True, kw_only=True):
    """One completion of a row.

    Attributes:
        text: None for a model without a tokenizer. It has no reasoning and tool calls that were parsed.
        stop_reason: the stop string that ended it; None if none did.
        token_ids: None if not requested.
        logprobs: of each token; None if not requested.
        prompt_logprobs: of each token of the prompt; None if not requested.
        echo: whether the text begins with the prompt.
        reasoning: what the model thought before it answered; None if there is none, or it is not parsed.
        reasoning_tokens: how many tokens it took.
        tool_calls: in the order of the text.
        whole: the text with reasoning and tool calls; None if not requested, or if nothing is parsed.
    """

    text: str | None
    finish_reason: str
    stop_reason: str | None = None
    token_ids: list[int] | None = None
    logprobs: ScoredTokens | None = None
    prompt_logprobs: ScoredTokens | None = None
    echo: bool = False
    reasoning: str | None = None
    reasoning_tokens: int = 0
    tool_calls: tuple[ToolCall, ...] = ()
    whole: str | None = None


class Score(NamedTuple):
    """How likely a continuation is.

    Attributes:
        logprob: the natural logarithm of its probability after the prompt: the sum over its tokens.
        num_tokens: how many it has.
        is_greedy: whether each of them is the likeliest at its place.
    """

    logprob: float
    num_tokens: int
    is_greedy: bool


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A row that was served.

    Attributes:
        row: as it was read.
        choices: ``n`` completions of the first prompt, then those of the next; none where nothing is generated.
        prompt_tokens, cached_tokens: of all prompts.
        completion_tokens: of all choices.
        pooled: the vector of each prompt, fp32, of a row that is embedded.
        tokens: of each prompt, if the model has given tokens numbers of their own.
        scores: of each continuation, or of the prompt, of a row that is scored.
        prompt: the text of the first prompt, as given or rendered; None for token ids.
        completions: what the engine made, in the same order.
    """

    row: Row
    choices: list[Choice]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    pooled: Sequence["array[float]"] = ()
    tokens: Sequence[LabelledTokens] = ()
    scores: Sequence[Score] = ()
    prompt: str | None = None
    completions: Sequence[Completion] = ()

    @property
    def finish_reasons(self) -> list[str]:
        """Of each choice, vector or score."""
        own = [done.finish_reason for done in self.completions] if self.pooled else ["scored"] * len(self.scores)
        return [choice.finish_reason for choice in self.choices] + own


class Shape(Protocol):
    """What results look like to who receives them, such as output lines."""

    def result(self, result: Result) -> Any:
        """Those of a row that was served. An error makes the row a failed one."""
        ...

    def failure(self, row: FailedRow) -> Any:
        """Those of a row that failed."""
        ...


def completion_fields(result: Result) -> dict[str, Any]:
    """The fields of a result that has completions, see ``RESULT_FIELDS``. Several completions become ``choices``.

    ``cached_tokens`` is left out: it may differ when a run is resumed.
    """
    usage = {"prompt_tokens": result.prompt_tokens, "completion_tokens": result.completion_tokens}
    first, *others = result.choices
    row: dict[str, Any] = {"index": result.row.index}
    if others:
        choices = [
            {"index": i, **_completion(each, result.row.index, i), **_details(each)}
            for i, each in enumerate(result.choices)
        ]
        row |= {"choices": choices, "usage": usage}
    else:
        row |= {**_completion(first, result.row.index, 0), "usage": usage, **_details(first)}
    if first.prompt_logprobs is not None:
        row["prompt_logprobs"] = first.prompt_logprobs.json(scored_token)
    return row


@dataclass(frozen=True, slots=True)
class PlainShape:
    """The carried fields of the input line and those of the result.

    Attributes:
        result_column: the one field that holds the result's; None: they are fields themselves.
        fields: the result's own.
    """

    result_column: str | None = None
    fields: Callable[[Result], dict[str, Any]] = completion_fields

    def result(self, result: Result) -> dict[str, Any]:
        """See ``Shape``."""
        return self._with_carried(result.row.metadata, self.fields(result))

    def failure(self, row: FailedRow) -> dict[str, Any]:
        """See ``Shape``. It has the row's place and its error."""
        message = f"{row.where}: {row.error.message}"
        own = {"index": row.index, "error": {"code": row.error.code, "message": message}}
        return self._with_carried(row.metadata, own)

    def _with_carried(self, carried: Mapping[str, Any], own: dict[str, Any]) -> dict[str, Any]:
        return {**carried, **(own if self.result_column is None else {self.result_column: own})}


def _completion(choice: Choice, row: int, number: int) -> dict[str, Any]:
    found: dict[str, Any] = {"text": choice.text}
    if choice.reasoning is not None:
        found["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        found["tool_calls"] = call_fields(choice.tool_calls, row, number)
    return {**found, "finish_reason": choice.finish_reason}


def _details(choice: Choice) -> dict[str, Any]:
    details: dict[str, Any] = {}
    if choice.token_ids is not None:
        details["token_ids"] = choice.token_ids
    if choice.logprobs is not None:
        details["logprobs"] = choice.logprobs.json(scored_token)
    return details


def scored_token(token: ScoredToken) -> dict[str, Any]:
    """A token with its log-probability as a result row has it."""
    return {"token": token.text, "token_id": token.token_id, "logprob": token.logprob}
