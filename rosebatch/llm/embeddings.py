"""What ``LLM.embed`` returns. Names and meanings as in vLLM."""

from dataclasses import dataclass

from rosebatch.io.results import Result
from rosebatch.llm.pooled_output import PooledRequestOutput, PooledShape


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of a prompt: numbers of fp32."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Its length."""
        return len(self.embedding)


@dataclass(slots=True, kw_only=True)
class EmbeddingRequestOutput(PooledRequestOutput):
    """A prompt and its vector; fields as of ``PooledRequestOutput``."""

    outputs: EmbeddingOutput | None


def _outputs(result: Result) -> EmbeddingOutput:
    (vector,) = result.pooled
    return EmbeddingOutput(vector.tolist())


EMBEDDINGS = PooledShape(EmbeddingRequestOutput, _outputs)
