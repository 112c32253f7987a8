"""What ``LLM.score`` returns; of pairs, with vLLM's names."""

from dataclasses import dataclass
from typing import ClassVar

from rosebatch.io.results import Result, Score
from rosebatch.io.rows import FailedRow
from rosebatch.llm.pooled_output import PooledRequestOutput, PooledShape


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreRequestOutput:
    """A prompt and the scores of its continuations.

    Attributes:
        scores: of each continuation, or one of the prompt itself; none for a prompt that failed.
        request_id, num_cached_tokens, error, error_code, finished: see ``RequestOutput``.
    """

    request_id: str
    scores: list[Score]
    num_cached_tokens: int = 0
    error: str | None = None
    error_code: str | None = None
    finished: bool = True
    num_generated_tokens: ClassVar[int] = 0

    @property
    def best(self) -> int:
        """The number of the likeliest continuation, the first of several."""
        return max(range(len(self.scores)), key=lambda number: self.scores[number].logprob)


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """How well the texts of a pair fit, after the model's activation."""

    score: float


@dataclass(slots=True, kw_only=True)
class ScoringRequestOutput(PooledRequestOutput):
    """A pair of texts and its score; fields as of ``PooledRequestOutput``."""

    outputs: ScoringOutput | None


def _score(result: Result) -> ScoringOutput:
    ((score,),) = result.pooled
    return ScoringOutput(score)


PAIRS = PooledShape(ScoringRequestOutput, _score)


class Scores:
    """See ``rosebatch.io.results.Shape``."""

    def result(self, result: Result) -> ScoreRequestOutput:
        """See ``Shape``."""
        return ScoreRequestOutput(
            request_id=str(result.row.index), scores=list(result.scores), num_cached_tokens=result.cached_tokens
        )

    def failure(self, row: FailedRow) -> ScoreRequestOutput:
        """See ``Shape``."""
        return ScoreRequestOutput(
            request_id=str(row.index), scores=[], error=row.error.message, error_code=row.error.code
        )


SCORES = Scores()
