"""What calls return that generate nothing: one output for each prompt, or pair of texts."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from rosebatch.io.results import Result
from rosebatch.io.rows import FailedRow
from rosebatch.llm.list_on_read import ListOnRead


@dataclass(slots=True, kw_only=True)
class PooledRequestOutput:
    """A prompt and what became of its pooled state.

    Attributes:
        outputs: of the prompt; None for one that failed.
        request_id, prompt_token_ids, num_cached_tokens, error, error_code, finished: see ``RequestOutput``.
    """

    request_id: str
    prompt_token_ids: list[int]
    outputs: Any
    num_cached_tokens: int = 0
    error: str | None = None
    error_code: str | None = None
    finished: bool = True
    num_generated_tokens: ClassVar[int] = 0


PooledRequestOutput.prompt_token_ids = ListOnRead(PooledRequestOutput.prompt_token_ids)  # type: ignore[assignment, misc]


@dataclass(frozen=True, slots=True)
class PooledShape:
    """See ``rosebatch.io.results.Shape``.

    Attributes:
        kind: of what a call returns.
        outputs: of that, from a result.
    """

    kind: type[PooledRequestOutput]
    outputs: Callable[[Result], Any]

    def result(self, result: Result) -> PooledRequestOutput:
        """See ``Shape``."""
        return self.kind(
            request_id=str(result.row.index),
            prompt_token_ids=result.completions[0].request.prompt_token_ids,  # type: ignore[arg-type]
            outputs=self.outputs(result),
            num_cached_tokens=result.cached_tokens,
        )

    def failure(self, row: FailedRow) -> PooledRequestOutput:
        """See ``Shape``."""
        return self.kind(
            request_id=str(row.index),
            prompt_token_ids=[],
            outputs=None,
            error=row.error.message,
            error_code=row.error.code,
        )
