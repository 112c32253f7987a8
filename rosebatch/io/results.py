"""What comes of a row, and the line that it becomes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from rosebatch.io.rows import FailedRow


class ScoredToken(NamedTuple):
    """A token with its log-probability, None for a prompt's first.

    Its bytes need be no whole text; a special token's are its name, which stands in no text.
    """

    token_id: int
    raw: bytes
    logprob: float | None
    top: tuple["ScoredToken", ...] = ()
    special: bool = False

    @property
    def text(self) -> str:
        """The bytes as text."""
        return self.raw.decode("utf-8", errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One completion of a row.

    Attributes:
        text: None for a model without a tokenizer.
        token_ids: None where they are not asked for.
        logprobs: of each token; None where they are not asked for.
        prompt_logprobs: of each token of the prompt.
        echo: whether the text begins with the prompt.
    """

    text: str | None
    finish_reason: str
    token_ids: list[int] | None = None
    logprobs: list[ScoredToken] | None = None
    prompt_logprobs: list[ScoredToken] | None = None
    echo: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of a row; ``index`` and ``metadata`` are the row's, tokens are counted over all choices."""

    index: int
    metadata: Mapping[str, Any]
    choices: list[Choice]
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Shape(Protocol):
    """How results are written."""

    def result(self, answer: Answer) -> dict[str, Any]:
        """The output line of a row that was served."""
        ...

    def failure(self, row: FailedRow) -> dict[str, Any]:
        """The line of one that was not."""
        ...


class PlainShape:
    """Fields of the input line beside those of ``RESULT_FIELDS``; of several completions, a list of ``choices``."""

    def result(self, answer: Answer) -> dict[str, Any]:
        """See ``Shape``. How much of the prompt was cached is left out: it may differ when a run is resumed."""
        usage = {"prompt_tokens": answer.prompt_tokens, "completion_tokens": answer.completion_tokens}
        first, *others = answer.choices
        row: dict[str, Any] = {**answer.metadata, "index": answer.index}
        if others:
            choices = [{"index": i, **_text(choice), **_details(choice)} for i, choice in enumerate(answer.choices)]
            row |= {"choices": choices, "usage": usage}
        else:
            row |= {**_text(first), "usage": usage, **_details(first)}
        if first.prompt_logprobs is not None:
            row["prompt_logprobs"] = scored_tokens(first.prompt_logprobs)
        return row

    def failure(self, row: FailedRow) -> dict[str, Any]:
        """See ``Shape``."""
        message = f"{row.where}: {row.error.message}"
        return {**row.metadata, "index": row.index, "error": {"code": row.error.code, "message": message}}


def _text(choice: Choice) -> dict[str, Any]:
    return {"text": choice.text, "finish_reason": choice.finish_reason}


def _details(choice: Choice) -> dict[str, Any]:
    details: dict[str, Any] = {}
    if choice.token_ids is not None:
        details["token_ids"] = choice.token_ids
    if choice.logprobs is not None:
        details["logprobs"] = scored_tokens(choice.logprobs)
    return details


def scored_tokens(tokens: Sequence[ScoredToken]) -> list[dict[str, Any]]:
    """Log-probabilities as they stand in a row."""

    def one(token: ScoredToken) -> dict[str, Any]:
        return {"token": token.text, "token_id": token.token_id, "logprob": token.logprob}

    return [{**one(token), "top_logprobs": [one(other) for other in token.top]} for token in tokens]
