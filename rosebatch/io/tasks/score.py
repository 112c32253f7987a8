"""Rows are scored: continuations of a prompt by their log-probabilities, pairs of texts by the model's own head."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from rosebatch.core.errors import FlagError, RowError
from rosebatch.core.pooling_params import PoolingParams
from rosebatch.io.columns import Columns
from rosebatch.io.pairs import PAIR, is_pair, pairs_of
from rosebatch.io.results import Result
from rosebatch.io.rows import PROMPT_FIELDS
from rosebatch.io.tasks.task import PromptFields, Task

if TYPE_CHECKING:
    import pyarrow as pa

# The key of why a model scores no prompts.
PROMPTS = "prompts"
# The key of the task's description.
DESCRIBED = "scoring"
# More would hold their prompts as many times.
MAX_CONTINUATIONS = 1024
# Names of the field that has them. Token ids are continuations of a single token each.
_NAMES = ("continuations", "choices", "logprob_token_ids")
SCORE = PoolingParams(task="score")


class _Fields(PromptFields):
    text_1: str | tuple[str, ...] | None = None
    text_2: str | tuple[str, ...] | None = None
    continuations: tuple[str | tuple[int, ...], ...] | None = None
    choices: tuple[str | tuple[int, ...], ...] | None = None
    logprob_token_ids: tuple[int, ...] | None = None


@dataclass(frozen=True)
class Score(Task):
    """See ``Task``."""

    name: ClassVar[str] = "score"
    doing: ClassVar[str] = "scoring"
    fields: ClassVar[type[PromptFields]] = _Fields
    prompt_fields: ClassVar[Sequence[str]] = (*PROMPT_FIELDS, *PAIR)
    result_fields: ClassVar[tuple[str, ...]] = ("index", "scores", "relevance", "usage", "error")

    def types(self) -> Mapping[str, "pa.DataType"]:
        """See ``Task``."""
        import pyarrow as pa

        from rosebatch.io.parquet_types import RESULT_TYPES

        score = pa.struct([("logprob", pa.float64()), ("num_tokens", pa.int64()), ("is_greedy", pa.bool_())])
        return {
            "index": pa.int64(),
            "scores": pa.list_(score),
            "relevance": pa.list_(pa.float32()),
            "usage": pa.struct([("prompt_tokens", pa.int64()), ("scored_tokens", pa.int64())]),
            "error": RESULT_TYPES["error"],
        }

    def result(self, result: Result) -> dict[str, Any]:
        """See ``Task``."""
        if result.pooled:
            relevance = [number for (number,) in result.pooled]
            usage = {"prompt_tokens": result.prompt_tokens, "scored_tokens": 0}
            return {"index": result.row.index, "relevance": relevance, "usage": usage}
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
        if line.text_1 is not None and line.text_2 is not None:
            return {**super().asks(line), "pairs": pairs_of(line.text_1, line.text_2), "pooling": SCORE}
        name, continuations = _continuations(line)
        return {**super().asks(line), "continuations": continuations, "continuations_name": name}

    def require_prompt(self, line: Any, values: Mapping[str, Any]) -> None:
        """See ``Task``. A pair of texts is a prompt too."""
        if not is_pair(line, (*PROMPT_FIELDS, *_NAMES)):
            super().require_prompt(line, values)

    def require_able(
        self, refused: Mapping[str, str], prompt_names: Sequence[str], hidden_size: int | None, columns: Columns
    ) -> None:
        """See ``Task``. A model that scores pairs has no use for prompts."""
        super().require_able(refused, prompt_names, hidden_size, columns)
        flags = {
            "--prompt-column": columns.prompt,
            "--prompt-template": columns.template,
            "--system-prompt": columns.system,
        }
        given = [flag for flag, value in flags.items() if value is not None]
        if given and PROMPTS in refused:
            raise FlagError(f"{given[0]} has no meaning: {refused[PROMPTS]}")

    def description(self, pooling: Mapping[str, Any], refused: Mapping[str, str]) -> dict[str, Any]:
        """See ``Task``."""
        return {DESCRIBED: {"of": "pairs" if PROMPTS in refused else "continuations or prompts"}}


def in_words(described: Mapping[str, Any]) -> str:
    """What the scores of a run are, from the value of its task's description."""
    return f"{'relevance' if described['of'] == 'pairs' else 'log-probabilities'} of {described['of']}"


def _continuations(line: _Fields) -> tuple[str, tuple[str | tuple[int, ...], ...]]:
    """The field of a line that has them, and what it has: nothing if the prompt itself is scored."""
    given = {name: value for name in _NAMES if (value := getattr(line, name)) is not None}
    if len(given) > 1:
        raise RowError("invalid_field", f"expected one of {', '.join(_NAMES)}; got {' and '.join(given)}")
    if not given:
        return _NAMES[0], ()
    ((name, values),) = given.items()
    if len(values) <= MAX_CONTINUATIONS:
        values = [(each,) if isinstance(each, int) else each for each in values]
    return name, require_continuations(name, values, has_tokens=line.prompt_token_ids is not None)


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
