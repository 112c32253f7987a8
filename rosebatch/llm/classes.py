"""What ``LLM.classify`` and ``LLM.reward`` return. Names and meanings as in vLLM."""

from dataclasses import dataclass
from typing import ClassVar

from rosebatch.io.results import Result
from rosebatch.io.rows import FailedRow
from rosebatch.io.tasks.classify import likeliest


@dataclass(frozen=True, slots=True)
class ClassificationOutput:
    """The numbers of a classifier's labels: fp32, in the order of the labels.

    Attributes:
        probs: after the model's activation.
        label: the likeliest one.
    """

    probs: list[float]
    label: str

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.probs)


@dataclass(frozen=True, slots=True)
class RewardOutput:
    """What a reward head gives a prompt: its outputs as they are, fp32."""

    data: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClassificationRequestOutput:
    """A prompt and its class.

    Attributes:
        outputs: of the prompt; None for one that failed.
        request_id, prompt_token_ids, num_cached_tokens, error, error_code, finished: see ``RequestOutput``.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: ClassificationOutput | RewardOutput | None
    num_cached_tokens: int = 0
    error: str | None = None
    error_code: str | None = None
    finished: bool = True
    num_generated_tokens: ClassVar[int] = 0


@dataclass(frozen=True, slots=True)
class Classes:
    """See ``rosebatch.io.results.Shape``.

    Attributes:
        raw: whether outputs are a reward.
    """

    raw: bool = False

    def result(self, result: Result) -> ClassificationRequestOutput:
        """See ``Shape``."""
        (numbers,) = result.pooled
        values = numbers.tolist()
        return ClassificationRequestOutput(
            request_id=str(result.row.index),
            prompt_token_ids=list(result.completions[0].request.prompt_token_ids),
            outputs=RewardOutput(values) if self.raw else ClassificationOutput(values, likeliest(result)),
            num_cached_tokens=result.cached_tokens,
        )

    def failure(self, row: FailedRow) -> ClassificationRequestOutput:
        """See ``Shape``."""
        return ClassificationRequestOutput(
            request_id=str(row.index),
            prompt_token_ids=[],
            outputs=None,
            error=row.error.message,
            error_code=row.error.code,
        )
