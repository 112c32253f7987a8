"""What ``LLM.embed`` returns. Names and meanings as in vLLM."""

from dataclasses import dataclass
from typing import ClassVar

from rosebatch.io.results import Result
from rosebatch.io.rows import FailedRow


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of a prompt: numbers of fp32."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its length."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRequestOutput:
    """A prompt and its vector.

    Attributes:
        outputs: the vector; None for a prompt that failed.
        request_id, prompt_token_ids, num_cached_tokens, error, error_code, finished: see ``RequestOutput``.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput | None
    num_cached_tokens: int = 0
    error: str | None = None
    error_code: str | None = None
    finished: bool = True
    num_generated_tokens: ClassVar[int] = 0


class Embeddings:
    """See ``rosebatch.io.results.Shape``."""

    def result(self, result: Result) -> EmbeddingRequestOutput:
        """See ``Shape``."""
        (vector,) = result.pooled
        return EmbeddingRequestOutput(
            request_id=str(result.row.index),
            prompt_token_ids=list(result.completions[0].request.prompt_token_ids),
            outputs=EmbeddingOutput(vector.tolist()),
            num_cached_tokens=result.cached_tokens,
        )

    def failure(self, row: FailedRow) -> EmbeddingRequestOutput:
        """See ``Shape``."""
        return EmbeddingRequestOutput(
            request_id=str(row.index),
            prompt_token_ids=[],
            outputs=None,
            error=row.error.message,
            error_code=row.error.code,
        )
