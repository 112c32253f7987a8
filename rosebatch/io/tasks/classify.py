"""Each prompt is classified: the model's own head gives its labels numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rosebatch.core.pooling_params import PoolingParams
from rosebatch.io.results import Result
from rosebatch.io.tasks.task import PromptFields, Task

if TYPE_CHECKING:
    import pyarrow as pa

# The key of the task's description.
DESCRIBED = "classes"
CLASSIFY = PoolingParams(task="classify")


@dataclass(frozen=True)
class Classify(Task):
    """See ``Task``."""

    name: ClassVar[str] = "classify"
    doing: ClassVar[str] = "classifying"
    result_fields: ClassVar[tuple[str, ...]] = ("index", "label", "probs", "score", "usage", "error")

    def types(self) -> Mapping[str, "pa.DataType"]:
        """See ``Task``."""
        import pyarrow as pa

        from rosebatch.io.parquet_types import RESULT_TYPES

        return {
            "index": pa.int64(),
            "label": pa.string(),
            "probs": pa.list_(pa.float32()),
            "score": pa.float32(),
            "usage": pa.struct([("prompt_tokens", pa.int64())]),
            "error": RESULT_TYPES["error"],
        }

    def result(self, result: Result) -> dict[str, Any]:
        """See ``Task``. A head with a single output gives a score."""
        (numbers,) = result.pooled
        own: dict[str, Any] = {"score": numbers[0]}
        if len(numbers) > 1:
            own = {"label": likeliest(result), "probs": numbers.tolist()}
        return {"index": result.row.index, **own, "usage": {"prompt_tokens": result.prompt_tokens}}

    def asks(self, line: PromptFields) -> dict[str, Any]:
        """See ``Task``."""
        return {**super().asks(line), "pooling": CLASSIFY}

    def description(self, pooling: Mapping[str, Any]) -> dict[str, Any]:
        """See ``Task``."""
        return {DESCRIBED: {"of": "prompts"}}


def likeliest(result: Result, prompt: int = 0) -> str:
    """The label with the largest number, the first of several, of one of the row's prompts."""
    pooling, numbers = result.completions[prompt].request.pooling, result.pooled[prompt]
    assert pooling is not None, "the engine has resolved it"
    return pooling.labels[max(range(len(numbers)), key=numbers.__getitem__)]


def in_words(described: Mapping[str, Any]) -> str:
    """What the numbers of a run are, from the value of its task's description."""
    return f"of {described['of']}"
