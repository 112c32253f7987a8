"""What ``LLM.classify`` and ``LLM.reward`` return. Names and meanings as in vLLM."""

from dataclasses import dataclass

from rosebatch.io.labelled_tokens import LabelledToken
from rosebatch.io.results import Result
from rosebatch.io.tasks.classify import likeliest
from rosebatch.llm.pooled_output import PooledRequestOutput, PooledShape


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
class TokenClassificationOutput:
    """What a head for tokens gives each token of a prompt.

    Attributes:
        probs: ``[T, labels]`` fp32, after the model's activation.
        tokens: each with its text, its place in the prompt's text, its likeliest label, and the number of that.
    """

    probs: list[list[float]]
    tokens: list[LabelledToken]

    @property
    def num_classes(self) -> int:
        """How many labels there are."""
        return len(self.probs[0])


@dataclass(frozen=True, slots=True)
class RewardOutput:
    """What a reward head gives a prompt: its outputs as they are, fp32.

    Attributes:
        data: ``[labels]``; of a head for tokens ``[T, labels]``. Of one for steps, probabilities, ``[steps, labels]``.
    """

    data: list[float] | list[list[float]]


@dataclass(slots=True, kw_only=True)
class ClassificationRequestOutput(PooledRequestOutput):
    """A prompt and its class, or its reward; fields as of ``PooledRequestOutput``."""

    outputs: ClassificationOutput | TokenClassificationOutput | RewardOutput | None


def _class(result: Result) -> ClassificationOutput | TokenClassificationOutput:
    for tokens in result.tokens:
        return TokenClassificationOutput(tokens.numbers.tolist(), tokens.read())
    (numbers,) = result.pooled
    return ClassificationOutput(numbers.tolist(), likeliest(result))


def _reward(result: Result) -> RewardOutput:
    for tokens in result.tokens:
        return RewardOutput(tokens.numbers.tolist())
    (numbers,) = result.pooled
    return RewardOutput(numbers.tolist())


CLASSES = PooledShape(ClassificationRequestOutput, _class)
REWARDS = PooledShape(ClassificationRequestOutput, _reward)
