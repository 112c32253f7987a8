"""Given continuations of each prompt, or the prompt itself, are scored: how likely the model finds them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rosebatch.core.errors import RowError
from rosebatch.io.results import Result
from rosebatch.io.tasks.task import PromptFields, Task

if TYPE_CHECKING:
    import pyarrow as pa

# The key of the task's description.
DESCRIBED = "scoring"
# More would hold their prompts as many times.
MAX_CONTINUATIONS = 1024
# Names of the field that has them. Token ids are continuations of a single token each.
_NAMES = ("continuations", "choices", "logprob_token_ids")


class _Fields(PromptFields):
    continuations: tuple[str | tuple[int, ...], ...] | None = None
    choices: tuple[str | tuple[int, ...], ...] | None = None
    logprob_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Score(Task):
    """See ``Task``."""

    name: ClassVar[str] = "score"
    doing: ClassVar[str] = "scoring"
    reads_logits: ClassVar[bool] = True
    fields: ClassVar[type[PromptFields]] = _Fields
    result_fields: ClassVar[tuple[str, ...]] = ("index", "scores", "usage", "error")

    def types(self) -> Mapping[str, "pa.DataType"]:
        """See ``Task``."""
        import pyarrow as pa

        from rosebatch.io.parquet_types import RESULT_TYPES

        score = pa.struct([("logprob", pa.float64()), ("num_tokens", pa.int64()), ("is_greedy", pa.bool_())])
        return {
            "index": pa.int64(),
            "scores": pa.list_(score),
            "usage": pa.struct([("prompt_tokens", pa.int64()), ("scored_tokens", pa.int64())]),
            "error": RESULT_TYPES["error"],
        }

    def result(self, result: Result) -> dict[str, Any]:
        """See ``Task``."""
        scored = sum(each.num_tokens for each in result.scores)
        # The number of passes over a prompt follows from how its continuations are grouped.
        scoring = result.completions[0].request.scoring
        assert scoring is not None, "the row is scored"
        return {
            "index": result.row.index,
            "scores": [each._asdict() for each in result.scores],
            "usage": {"prompt_tokens": scoring.start, "scored_tokens": scored},
        }

    def opens_answer(self, line: _Fields) -> bool:
        """See ``Task``. Continuations answer a chat."""
        given = line.add_generation_prompt
        return any(getattr(line, name) is not None for name in _NAMES) if given is None else given

    def asks(self, line: _Fields) -> dict[str, Any]:
        """See ``Task``."""
        return {**super().asks(line), "continuations": _continuations(line)}

    def description(self, pooling: Mapping[str, Any]) -> dict[str, Any]:
        """See ``Task``."""
        return {DESCRIBED: {"of": "continuations"}}


def in_words(described: Mapping[str, Any]) -> str:
    """What the scores of a run are, from the value of its task's description."""
    return f"log-probabilities of {described['of']}"


def _continuations(line: _Fields) -> tuple[str | tuple[int, ...], ...]:
    """Those of a line; none if the prompt itself is scored."""
    given = {name: value for name in _NAMES if (value := getattr(line, name)) is not None}
    if len(given) > 1:
        raise RowError("invalid_field", f"expected one of {', '.join(_NAMES)}; got {' and '.join(given)}")
    if not given:
        return ()
    ((name, values),) = given.items()
    values = [(each,) if isinstance(each, int) else each for each in values]
    return require_continuations(name, values, has_tokens=line.prompt_token_ids is not None)


def require_continuations(name: str, values: Any, *, has_tokens: bool) -> tuple[str | tuple[int, ...], ...]:
    """Check the continuations of a prompt.

    Args:
        name: of the field that has them.
        values: texts, and sequences of token ids.
        has_tokens: whether the prompt is token ids.

    Raises:
        RowError: there are none, too many, an empty one, or a text after token ids.
        TypeError: they are no sequence.
    """
    if not 1 <= len(values) <= MAX_CONTINUATIONS:
        raise RowError("invalid_field", f"{name} must have 1 to {MAX_CONTINUATIONS} values, got {len(values)}")
    if not all(values):
        raise RowError("invalid_field", f"{name} has an empty one")
    if has_tokens and any(isinstance(each, str) for each in values):
        raise RowError("invalid_field", f"{name} of prompt_token_ids must be lists of token ids")
    return tuple(each if isinstance(each, str) else tuple(each) for each in values)
