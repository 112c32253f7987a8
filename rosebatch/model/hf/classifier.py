"""Classification heads of transformers' classes, as config.json describes them."""

from collections.abc import Mapping
from typing import Any

from rosebatch.config.classifier import ClassifierConfig, HeadLayer
from rosebatch.core.plain import is_text
from rosebatch.core.pooling_params import Activation
from rosebatch.host.model_files import shown
from rosebatch.model.family import TOKEN_CLASSIFIER, Architecture, ClassifierHead
from rosebatch.model.hf.fields import UnservedError, size

# How transformers names classes with a head for whole prompts, and with one for tokens.
_PROMPTS, _TOKENS = "ForSequenceClassification", "ForTokenClassification"
# The same of classes outside of it.
_REWARDS = ("ForRewardModel", "ForProcessRewardModel")
_BY_PROBLEM: dict[str, Activation] = {
    "single_label_classification": "softmax",
    "multi_label_classification": "sigmoid",
    "regression": "none",
}
# sentence-transformers' names of what cross-encoders' outputs go through.
_BY_FUNCTION: dict[str, Activation] = {"Sigmoid": "sigmoid", "Identity": "none"}
# transformers' own number of labels.
_LABELS = 2


def split_class(name: str) -> tuple[str, str]:
    """The stem of a class with a head that classifies, and the rest of its name; for others, the name and nothing."""
    head = next((each for each in (_PROMPTS, _TOKENS, *_REWARDS) if name.endswith(each)), "")
    return name.removesuffix(head), head


def has_head(architecture: Architecture, head: str) -> bool:
    """Whether there is such a class with this rest of its name."""
    return head in (_PROMPTS, _TOKENS, *architecture.rewards)


def parse_classifier(values: Mapping[str, Any], architecture: Architecture, head: str) -> ClassifierConfig:
    """The classifier of a class.

    Args:
        values: of config.json.
        architecture: of the class.
        head: what follows the stem of the class's name; see ``has_head``.

    Raises:
        ValueError: labels or kinds of outputs are not served.
    """
    if head in architecture.rewards:
        return architecture.rewards[head]
    labels = _labels(values)
    pooling, layers = (_head_of_tokens if head == _TOKENS else _head_of_prompts)(values, architecture)
    padding = values.get("pad_token_id") if pooling == "last" else None
    return ClassifierConfig(
        labels=labels,
        layers=layers,
        pooling=pooling,
        activation=_activation(values, len(labels)),
        padding=padding if type(padding) is int else None,
    )


def _head_of_prompts(values: Mapping[str, Any], architecture: Architecture) -> ClassifierHead:
    """That of decoders is one product of the last token's state, padding left out."""
    if architecture.classifier is not None:
        return architecture.classifier(values)
    return "last", (HeadLayer(name="score", bias=False),)


def _head_of_tokens(values: Mapping[str, Any], architecture: Architecture) -> ClassifierHead:
    """One product of each state, with another name in encoders than in most decoders."""
    if architecture.token_classifier is not None:
        return "all", architecture.token_classifier(values)
    if architecture.classifier is not None:
        return "all", TOKEN_CLASSIFIER
    return "all", (HeadLayer(name="score", bias=values.get("token_classification_bias", True)),)


def _labels(values: Mapping[str, Any]) -> tuple[str, ...]:
    named = values.get("id2label")
    if named is None:
        number = _LABELS if values.get("num_labels") is None else size(values, "num_labels")
        return tuple(f"LABEL_{i}" for i in range(number))
    by_id = {str(key): str(label) for key, label in named.items()} if isinstance(named, Mapping) else {}
    ids = [str(i) for i in range(len(by_id))]
    if by_id.keys() != set(ids) or not ids:
        raise ValueError(f"id2label must have the keys 0, 1, 2 …, got {shown(named)}")
    if not all(map(is_text, by_id.values())):
        raise ValueError("id2label has a label that is not valid Unicode")
    return tuple(by_id[i] for i in ids)


def _activation(values: Mapping[str, Any], num_labels: int) -> Activation:
    """As transformers' pipelines, and for cross-encoders sentence-transformers, decide."""
    own = values.get("sentence_transformers") or {}
    function = own.get("activation_fn") or values.get("sbert_ce_default_activation_function")
    if function is not None:
        name = str(function).rpartition(".")[2]
        if name not in _BY_FUNCTION:
            raise UnservedError(f"activation_fn {shown(function)} is not supported")
        return _BY_FUNCTION[name]
    problem = values.get("problem_type")
    if problem is None:
        problem = "single_label_classification"
    if problem not in _BY_PROBLEM:
        raise UnservedError(f"problem_type {shown(problem)} is not supported")
    # A softmax of one number is 1, whatever it is.
    return "sigmoid" if num_labels == 1 and problem != "regression" else _BY_PROBLEM[problem]
