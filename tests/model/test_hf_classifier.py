"""Heads of classes, as config.json describes them."""

import pytest

from rosebatch.model.hf.classifier import parse_classifier
from rosebatch.model.registry import ARCHITECTURES

PROMPTS = "ForSequenceClassification"


def parsed(**values):
    return parse_classifier(values, next(iter(ARCHITECTURES.values())), PROMPTS)


@pytest.mark.parametrize(
    ("problem", "one", "two"),
    [
        (None, "sigmoid", "softmax"),
        ("single_label_classification", "sigmoid", "softmax"),
        ("multi_label_classification", "sigmoid", "sigmoid"),
        ("regression", "none", "none"),
    ],
)
def test_activations_are_those_of_pipelines(problem, one, two):
    """A reranker with one output and the problem of single labels scored each pair 1."""
    activations = [parsed(problem_type=problem, num_labels=labels).activation for labels in (1, 2)]
    assert activations == [one, two]


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"id2label": {"0": "a", "2": "c"}}, "id2label must have the keys 0, 1, 2"),
        ({"id2label": {"zero": "a"}}, "id2label must have the keys 0, 1, 2"),
        ({"id2label": ["a", "b"]}, "id2label must have the keys 0, 1, 2"),
        ({"id2label": {}}, "id2label must have the keys 0, 1, 2"),
        ({"id2label": {"0": "a\ud800"}}, "label that is not valid Unicode"),
        ({"num_labels": "two"}, "num_labels must be a whole number"),
        ({"num_labels": 10**12}, "num_labels must be in"),
        ({"problem_type": "odd"}, "problem_type 'odd' is not supported"),
    ],
)
def test_labels_that_are_none(values, told):
    """Some were told in words of Python alone; half a character ended the job at its first result."""
    with pytest.raises(ValueError, match=told):
        parsed(**values)


def test_labels_that_are_no_texts():
    """They are counted by their ids, whatever the order of the file."""
    assert parsed(id2label={"1": 5, "0": "a"}).labels == ("a", "5")
