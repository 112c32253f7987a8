"""Each prompt, or each of its tokens, is classified: the model's own head gives labels numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rosebatch.core.errors import FlagError, RowError
from rosebatch.core.pooling_params import PoolingParams
from rosebatch.io.columns import Columns
from rosebatch.io.labelled_tokens import shortest
from rosebatch.io.pairs import PAIR, is_pair
from rosebatch.io.results import Result
from rosebatch.io.rows import PROMPT_FIELDS
from rosebatch.io.tasks.task import PromptFields, Task

if TYPE_CHECKING:
    import pyarrow as pa

# The key of why a model gives tokens no labels.
TOKENS = "tokens"
# The key of the task's description.
DESCRIBED = "classes"
CLASSIFY = PoolingParams(task="classify")


class _Fields(PromptFields):
    text_1: str | None = None
    text_2: str | None = None


@dataclass(frozen=True)
class Classify(Task):
    """See ``Task``.

    Attributes:
        token_probs: whether tokens that are classified have the numbers of all labels.
    """

    name: ClassVar[str] = "classify"
    doing: ClassVar[str] = "classifying"
    fields: ClassVar[type[PromptFields]] = _Fields
    prompt_fields: ClassVar[Sequence[str]] = (*PROMPT_FIELDS, *PAIR)
    result_fields: ClassVar[tuple[str, ...]] = (
        "index", "label", "probs", "score", "tokens", "rewards", "usage", "error",
    )  # fmt: skip
    token_probs: bool = False

    def types(self) -> Mapping[str, "pa.DataType"]:
        """See ``Task``."""
        import pyarrow as pa

        from rosebatch.io.parquet_types import RESULT_TYPES

        numbers = pa.list_(pa.float32())
        token = [("token", pa.string()), ("start", pa.int64()), ("end", pa.int64())]
        token += [("label", pa.string()), ("score", pa.float32()), *[("probs", numbers)] * self.token_probs]
        return {
            "index": pa.int64(),
            "label": pa.string(),
            "probs": numbers,
            "score": pa.float32(),
            "tokens": pa.list_(pa.struct(token)),
            "rewards": numbers,
            "usage": pa.struct([("prompt_tokens", pa.int64())]),
            "error": RESULT_TYPES["error"],
        }

    def result(self, result: Result) -> dict[str, Any]:
        """See ``Task``."""
        return {"index": result.row.index, **self._classes(result), "usage": {"prompt_tokens": result.prompt_tokens}}

    def _classes(self, result: Result) -> dict[str, Any]:
        """What a head has made of a prompt; one with a single output, and one for steps, give no labels."""
        if result.tokens:
            (tokens,) = result.tokens
            if result.row.pairs:
                raise RowError("unsupported_pooling", "the model classifies tokens: a pair has no label")
            if tokens.of_steps:
                return {"rewards": shortest(tokens.numbers[:, -1])}
            return {"tokens": tokens.read(probs=self.token_probs)}
        (numbers,) = result.pooled
        if len(numbers) == 1:
            return {"score": numbers[0]}
        return {"label": likeliest(result), "probs": numbers.tolist()}

    def asks(self, line: _Fields) -> dict[str, Any]:
        """See ``Task``."""
        pairs = ((line.text_1, line.text_2),) if line.text_1 is not None else ()
        return {**super().asks(line), "pairs": pairs, "pooling": CLASSIFY}

    def require_prompt(self, line: Any, values: Mapping[str, Any]) -> None:
        """See ``Task``. A pair of texts is a prompt too."""
        if not is_pair(line, PROMPT_FIELDS):
            super().require_prompt(line, values)

    def require_able(
        self, refused: Mapping[str, str], prompt_names: Sequence[str], hidden_size: int | None, columns: Columns
    ) -> None:
        """See ``Task``."""
        super().require_able(refused, prompt_names, hidden_size, columns)
        if self.token_probs and (why := refused.get(TOKENS)):
            raise FlagError(f"--token-probs has no meaning: {why}")

    def require_applies(self, *, is_batch: bool, to_table: bool) -> None:
        """See ``Task``."""
        if self.token_probs and is_batch:
            raise FlagError(
                "--token-probs has no meaning for an OpenAI batch: /v1/pooling has the numbers of all labels"
            )

    def description(self, pooling: Mapping[str, Any], refused: Mapping[str, str]) -> dict[str, Any]:
        """See ``Task``."""
        return {DESCRIBED: {"of": "prompts", **({"token_probs": True} if self.token_probs else {})}}


def likeliest(result: Result, prompt: int = 0) -> str:
    """The label with the largest number, the first of several, of one of the row's prompts.

    Raises:
        RowError: the model classifies tokens.
    """
    if result.tokens:
        raise RowError("unsupported_pooling", "the model classifies tokens: a prompt has no label")
    pooling, numbers = result.completions[prompt].request.pooling, result.pooled[prompt]
    assert pooling is not None, "the engine has resolved it"
    return pooling.labels[max(range(len(numbers)), key=numbers.__getitem__)]


def in_words(described: Mapping[str, Any]) -> str:
    """What the numbers of a run are, from the value of its task's description."""
    return f"of {described['of']}"
