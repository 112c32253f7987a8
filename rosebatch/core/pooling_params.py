"""How the hidden states of a prompt become one vector."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, Self, get_args

from rosebatch.core.errors import FlagError, RowError
from rosebatch.core.words import quoted

Pooling = Literal["last", "mean", "max", "cls"]
# Of a classifier, also the states of all tokens, or of those that end steps.
AnyPooling = Pooling | Literal["all"]
# How JSON holds a vector.
EncodingFormat = Literal["float", "base64"]
# What the outputs of a classifier go through.
Activation = Literal["softmax", "sigmoid", "none"]
PoolingTask = Literal["embed", "classify", "score"]
# Larger than any hidden state.
_MAX_DIMENSIONS = 2**24
# Different parameters that a process completes once.
_MAX_COMPLETED = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """What an embedding is made of; None leaves it to the model.

    The hidden states are those after the model's last norm. The vector is cut, then normalised.

    Attributes:
        pooling: the state of the last token, the mean over all tokens, each number's largest, or the state of the first
            (``cls``), which is of models whose tokens see those after them. If a model says nothing: ``mean`` for
            these, else ``last``.
        normalize: whether the vector has length 1. A model that says nothing: True.
        dimensions: numbers of the vector that are kept, the first ones; None for all (source: Kusupati et al. 2022,
            Matryoshka Representation Learning).
        prompt_name: which of the model's own texts precedes each text, such as ``query``.
        task: what becomes of the state: a vector, a number for each label, or the one number of a head that scores. A
            classifier pools as it was trained: one that classifies tokens has numbers for each of them.
        activation: what a classifier's outputs go through; None leaves it to the model.
        labels: of a classifier's outputs; the engine knows them.
        step_token: the token whose states alone are read, where a model rates the steps of an answer.
        padding: the token that a classifier passes over at the end of a prompt.

    Raises:
        ValueError: a value outside its range, named in the message.
    """

    pooling: AnyPooling | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    prompt_name: str | None = None
    task: PoolingTask = "embed"
    activation: Activation | None = None
    labels: tuple[str, ...] = ()
    step_token: int | None = None
    padding: int | None = None

    def __post_init__(self) -> None:
        of_tokens = ("all",) if self.task == "classify" else ()
        if self.pooling not in (None, *get_args(Pooling), *of_tokens):
            raise ValueError(f"pooling must be {', '.join(get_args(Pooling)[:-1])} or cls, got {quoted(self.pooling)}")
        if not isinstance(self.normalize, bool | None):
            raise ValueError(f"normalize must be True or False, got {quoted(self.normalize)}")
        given = self.dimensions
        if given is not None and (type(given) is not int or not 1 <= given <= _MAX_DIMENSIONS):
            raise ValueError(f"dimensions must be an integer in [1, {_MAX_DIMENSIONS}], got {quoted(given)}")
        if self.task not in get_args(PoolingTask):
            raise ValueError(f"task must be {' or '.join(get_args(PoolingTask))}, got {quoted(self.task)}")
        if self.activation not in (None, *get_args(Activation)):
            raise ValueError(
                f"activation must be one of {', '.join(get_args(Activation))}, got {quoted(self.activation)}"
            )
        if self.task != "embed" and given is not None:
            raise ValueError("dimensions are of vectors: a classifier has one number for each label")
        if not isinstance(self.prompt_name, str | None):
            raise ValueError(f"prompt_name must be a text, got {quoted(self.prompt_name)}")

    @property
    def of_tokens(self) -> bool:
        """Whether tokens have numbers of their own."""
        return self.pooling == "all"

    def read(self, prompt_token_ids: Sequence[int]) -> Sequence[int]:
        """The tokens of a prompt up to the last one whose state counts."""
        if self.padding is None:
            return prompt_token_ids
        end = len(prompt_token_ids)
        while end > 1 and prompt_token_ids[end - 1] == self.padding:
            end -= 1
        return prompt_token_ids[:end]

    def require_vector(self) -> None:
        """Check that a vector is asked for.

        Raises:
            FlagError: numbers of a classifier are.
        """
        if self.task != "embed":
            raise FlagError(f"pooling_params with task={self.task!r} ask for no vector: use {self.task}")

    def over(self, defaults: Self) -> Self:
        """These, with the defaults for what they leave open."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return type(self)(**{name: getattr(defaults, name) if own[name] is None else own[name] for name in own})


NO_CLASSIFIER = (
    "the model has no classification head: the class that its config.json names ends with neither "
    "ForSequenceClassification nor ForTokenClassification"
)
NO_SCORE = "a score needs a head for whole prompts: this is for tokens"
NO_CONTINUATIONS = "the model has no output projection: it scores pairs alone, text_1 and text_2"
# The defaults of a model without its own.
PLAIN = PoolingParams(pooling="last", normalize=True)
# The same, of a model whose tokens see those after them.
MEAN = PoolingParams(pooling="mean", normalize=True)


@dataclass(frozen=True, slots=True)
class Dense:
    """A product that vectors go through after they are pooled.

    Attributes:
        folder: of its weights.
        inputs, outputs: numbers of a vector before and after it.
        bias: whether it has one.
        tanh: whether that follows.
    """

    folder: Path
    inputs: int
    outputs: int
    bias: bool = True
    tanh: bool = False


@dataclass(frozen=True, slots=True)
class ModelPooling:
    """How a model pools.

    Attributes:
        params: the model's own, for what a request leaves open.
        refused: why they are not served, so that a request has to name its pooling; None if they are.
        bidirectional: whether the model's tokens see those after them, so that the first can stand for all.
        dense: what follows any pooling, before vectors are cut and normalised.
        classifier: the pooling, activation and labels of the model's own classifier; None if it has none.
    """

    params: PoolingParams = field(default_factory=PoolingParams)
    refused: str | None = None
    bidirectional: bool = False
    dense: tuple[Dense, ...] = ()
    classifier: PoolingParams | None = None

    def size(self, hidden_size: int) -> int:
        """Numbers of a vector."""
        return self.dense[-1].outputs if self.dense else hidden_size

    @property
    def no_score(self) -> str | None:
        """Why its head gives pairs no scores; None if it does."""
        if self.classifier is None:
            return NO_CLASSIFIER
        if self.classifier.of_tokens:
            return NO_SCORE
        labels = len(self.classifier.labels)
        return None if labels == 1 else f"a score needs a head with a single output: this has {labels}"

    @property
    def lacks(self) -> dict[str, str]:
        """Poolings that the model cannot have, and why."""
        return {} if self.bidirectional else {"cls": "the first token of this model sees no other"}

    def of(self, asked: PoolingParams) -> PoolingParams:
        """The parameters of a request, complete.

        Raises:
            RowError: it leaves the pooling to the model, whose own is not served, or the first token sees no other.
        """
        return _completed(self, asked)

    def require_steps(self, asked: PoolingParams | None, prompt_token_ids: Sequence[int]) -> None:
        """Check that a prompt has a step, if the model rates steps.

        Raises:
            RowError: it has none.
        """
        step = None if self.classifier is None else self.classifier.step_token
        if step is not None and asked is not None and asked.task != "embed" and step not in prompt_token_ids:
            raise RowError("nothing_to_score", f"the model rates steps that end with token {step}: the prompt has none")


# Rows share their parameters. To complete those of each took a third of the time that a short prompt takes the host.
@lru_cache(_MAX_COMPLETED)
def _completed(model: ModelPooling, asked: PoolingParams) -> PoolingParams:
    """See ``ModelPooling.of``."""
    if asked.task != "embed":
        if model.classifier is None:
            raise RowError("unsupported_pooling", NO_CLASSIFIER)
        if asked.task == "score" and model.no_score:
            raise RowError("unsupported_pooling", model.no_score)
        # Rewards of steps are probabilities.
        given = asked.activation if model.classifier.step_token is None else None
        return replace(model.classifier, activation=given or model.classifier.activation, task=asked.task)
    if model.refused and asked.pooling is None:
        raise RowError("unsupported_pooling", model.refused)
    found = asked.over(model.params).over(PLAIN)
    if (why := model.lacks.get(found.pooling or "")) is not None:
        raise RowError("unsupported_pooling", f"pooling {found.pooling}: {why}")
    return found


# The pooling of a model without its own.
PLAIN_POOLING = ModelPooling()


def cannot_generate() -> RowError:
    """The error of a request that generates, if the model has no output projection."""
    return RowError("embeds_only", "the model has no output projection: it can embed, and not generate")


@dataclass(frozen=True, slots=True)
class NamedPrompts:
    """Texts that a model wants before what it embeds: its "prompts", such as an instruction for queries.

    Attributes:
        by_name: the texts.
        default: the name of the prompt where none is named; None for no prompt.
        lower_case: whether the model was trained on texts in small letters, which its tokenizer leaves to others.
        second_text: what is added to the token ids of a pair's second text, if the model tells the two apart.
    """

    by_name: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None
    lower_case: bool = False
    second_text: int = 0

    def named(self, name: str | None) -> str:
        """The text of this name; for None, that of the default, or nothing.

        Raises:
            RowError: the model has no prompt of this name.
        """
        name = self.default if name is None else name
        if name is None:
            return ""
        if name not in self.by_name:
            known = f"it has {', '.join(sorted(self.by_name))}" if self.by_name else "it has none"
            raise RowError("invalid_field", f"prompt_name: the model has no prompt {name!r}; {known}")
        return self.by_name[name]


NO_PROMPTS = NamedPrompts()
