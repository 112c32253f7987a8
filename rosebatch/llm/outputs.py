"""What ``LLM.generate`` and its kin return. Names and meanings as in vLLM, so that scripts find what they look for."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, overload

from rosebatch.core.request import Completion
from rosebatch.io.results import Choice, Result
from rosebatch.io.rows import FailedRow
from rosebatch.io.scored_tokens import ScoredToken
from rosebatch.io.tools import call_fields
from rosebatch.llm.list_on_read import ListOnRead


class Logprob(NamedTuple):
    """A token's log-probability, by the model's own logits.

    Attributes:
        rank: 1 for the likeliest token.
        decoded_token: its text; a part of a character becomes a replacement mark.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class RequestMetrics(NamedTuple):
    """When things happened to a request, in seconds; the times are of one clock that has no date.

    Attributes:
        first_token_latency: from the arrival to the first token of any completion.
        num_generation_tokens: of all completions.
    """

    arrival_time: float
    first_token_ts: float
    last_token_ts: float
    first_token_latency: float
    num_generation_tokens: int


# Of one token: the chosen one and the likeliest ones, by token id.
TokenLogprobs = dict[int, Logprob]


class LogprobsOfTokens(Sequence[TokenLogprobs]):
    """Of each token of a completion. Dictionaries are made when they are read; pickled, they are a list."""

    def __init__(self, tokens: Sequence[ScoredToken]) -> None:
        self._tokens = tokens

    def __len__(self) -> int:
        return len(self._tokens)

    @overload
    def __getitem__(self, at: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, at: slice) -> list[TokenLogprobs]: ...

    def __getitem__(self, at: int | slice) -> TokenLogprobs | list[TokenLogprobs]:
        return list(map(_by_id, self._tokens[at])) if isinstance(at, slice) else _by_id(self._tokens[at])

    def __iter__(self) -> Iterator[TokenLogprobs]:
        return map(_by_id, self._tokens)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))

    def __reduce__(self) -> tuple[type, tuple[list[TokenLogprobs]]]:
        return list, (list(self),)


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One completion of a prompt.

    Attributes:
        index: which of the prompt's ``n`` it is, from 0.
        text: up to the first stop string; empty without a tokenizer.
        token_ids: all generated tokens, the end token or those of a stop string included.
        finish_reason: ``stop`` or ``length``.
        stop_reason: the stop string, or the one of ``stop_token_ids``, that ended it; None for anything else.
        logprobs: for each token, if asked for.
        cumulative_logprob: their sum over the chosen tokens, if asked for.
        token_times: seconds from the request's arrival to each token. Tokens of one decode window came together.
        message: of a chat, the answer as the chat API writes it, its reasoning and tool calls split off the
            content: ``{"role": "assistant", "content": ...}``, with ``reasoning_content`` and ``tool_calls`` where the
            model has written some. It can be put after the messages to go on.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str
    stop_reason: str | int | None = None
    logprobs: Sequence[TokenLogprobs] | None = None
    cumulative_logprob: float | None = None
    token_times: Sequence[float] = ()
    message: dict[str, Any] | None = None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A prompt and its completions.

    Attributes:
        request_id: the number of the prompt since the model was loaded, as text.
        prompt: the text; of a chat, as the template rendered it; None for token ids.
        prompt_token_ids: what the model saw.
        outputs: ``n`` completions; none for a prompt that failed.
        prompt_logprobs: for each token of the prompt, None for the first; if asked for.
        num_cached_tokens: prompt tokens that came from the prefix cache.
        error: why the prompt could not be served; None if it was.
        error_code: the same as a stable snake_case word.
        finished: always True.
        metrics: its times; None for a prompt that failed.
        lora_request: always None.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    num_cached_tokens: int = 0
    error: str | None = None
    error_code: str | None = None
    finished: bool = True
    metrics: RequestMetrics | None = None
    lora_request: ClassVar[None] = None

    @property
    def num_generated_tokens(self) -> int:
        """Of all completions."""
        return sum(len(each.token_ids) for each in self.outputs)


RequestOutput.prompt_token_ids = ListOnRead(RequestOutput.prompt_token_ids)  # type: ignore[assignment, misc]


class Completions:
    """See ``rosebatch.io.results.Shape``."""

    def result(self, result: Result) -> RequestOutput:
        """See ``Shape``."""
        is_chat = result.row.messages is not None
        scored = result.choices[0].prompt_logprobs
        outputs: list[CompletionOutput] = []
        # One expression would take a call for each row.
        for choice, done in zip(result.choices, result.completions, strict=True):
            index = len(outputs)
            completion = CompletionOutput(
                index=index,
                text=(choice.text if choice.whole is None else choice.whole) or "",
                token_ids=choice.token_ids or [],
                finish_reason=choice.finish_reason,
                stop_reason=_stop_reason(choice, done),
                logprobs=None if choice.logprobs is None else LogprobsOfTokens(choice.logprobs),
                cumulative_logprob=_sum(done) if choice.logprobs is not None else None,
                token_times=[time - done.arrival_time for time in done.token_times],
                message=_message(choice, result.row.index, index) if is_chat else None,
            )
            outputs.append(completion)
        return RequestOutput(
            request_id=str(result.row.index),
            prompt=result.prompt,
            prompt_token_ids=result.completions[0].request.prompt_token_ids,  # type: ignore[arg-type]
            outputs=outputs,
            prompt_logprobs=None if scored is None else _of_prompt(scored),
            num_cached_tokens=result.cached_tokens,
            metrics=_metrics(result.completions),
        )

    def failure(self, row: FailedRow) -> RequestOutput:
        """See ``Shape``."""
        return RequestOutput(
            request_id=str(row.index),
            prompt=None,
            prompt_token_ids=[],
            outputs=[],
            error=row.error.message,
            error_code=row.error.code,
        )


COMPLETIONS = Completions()


def _metrics(completions: Sequence[Completion]) -> RequestMetrics:
    done = completions[0]
    arrival, times, tokens = done.arrival_time, done.token_times or (done.finish_time,), len(done.token_ids)
    first, last = times[0], times[-1]
    for done in completions[1:]:
        times = done.token_times or (done.finish_time,)
        first, last, tokens = min(first, times[0]), max(last, times[-1]), tokens + len(done.token_ids)
    return RequestMetrics(arrival, first, last, first - arrival, tokens)


def _stop_reason(choice: Choice, completion: Completion) -> str | int | None:
    ends = completion.request.sampling.stop_token_ids
    if choice.stop_reason is None and ends and completion.finish_reason == "stop" and completion.token_ids[-1] in ends:
        return completion.token_ids[-1]
    return choice.stop_reason


def _message(choice: Choice, row: int, number: int) -> dict[str, Any]:
    """The answer of a chat, as the chat API writes it."""
    message: dict[str, Any] = {"role": "assistant", "content": choice.text}
    if choice.reasoning is not None:
        message["reasoning_content"] = choice.reasoning
    if choice.tool_calls:
        message |= {"content": choice.text or None, "tool_calls": call_fields(choice.tool_calls, row, number)}
    return message


def _by_id(token: ScoredToken) -> TokenLogprobs:
    assert token.logprob is not None, "a generated token has one"
    found = {
        each.token_id: Logprob(each.logprob, rank, each.text)
        for rank, each in enumerate(token.top, start=1)
        if each.logprob is not None
    }
    found.setdefault(token.token_id, Logprob(token.logprob, token.rank or None, token.text))
    return found


def _of_prompt(tokens: Sequence[ScoredToken]) -> list[TokenLogprobs | None]:
    return [None if token.logprob is None else _by_id(token) for token in tokens]


def _sum(completion: Completion) -> float:
    return completion.logprobs.total() if completion.logprobs else 0.0
