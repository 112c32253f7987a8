"""The tasks of the package: a later one is added here."""

from collections.abc import Callable, Mapping
from typing import Any

from rosebatch.core.pooling_params import NO_CLASSIFIER, ModelPooling, cannot_generate
from rosebatch.io.tasks import classify, embed, score
from rosebatch.io.tasks.classify import TOKENS, Classify
from rosebatch.io.tasks.embed import Embed
from rosebatch.io.tasks.generate import GENERATE
from rosebatch.io.tasks.score import PROMPTS, Score
from rosebatch.io.tasks.task import IMAGES, Task

# The one without a description comes last.
TASKS: tuple[Task, ...] = (Embed(), Score(), Classify(), GENERATE)
# What a report for people says of a task's description: its key, and its value in words.
IN_WORDS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    each.DESCRIBED: each.in_words for each in (embed, score, classify)
}


def described_by(manifest: Mapping[str, Any]) -> Task:
    """The task whose description a manifest has."""
    return next(task for task in TASKS if task.description({}, {}).keys() <= manifest.keys())


def refusals(model: str, pooling: ModelPooling, *, has_head: bool, no_images: str | None = None) -> dict[str, str]:
    """Why a model cannot do a task, or a part of it, by the name of this, or cannot pool so, by the pooling's.

    Args:
        model: its name.
        pooling: its own.
        has_head: whether it has an output projection.
        no_images: why no row may have images; None if rows may.
    """
    able = Embed.name if pooling.classifier is None else Classify.name
    of_samples = None if has_head else f"{model}: {cannot_generate().message}; use rosebatch {able}"
    of_classes = f"{model}: {NO_CLASSIFIER}" if pooling.classifier is None else None
    of_scores = of_samples
    if pooling.classifier is not None:
        of_scores = pooling.no_score and f"{model}: {pooling.no_score}: use rosebatch classify"
    why = {Embed.name: pooling.refused, Classify.name: of_classes, Score.name: of_scores}
    found = {task.name: of_samples if task.reads_logits else why[task.name] for task in TASKS}
    if pooling.classifier is not None:
        found[PROMPTS] = f"{model} scores pairs of texts: name their columns text_1 and text_2"
        if not pooling.classifier.of_tokens or pooling.classifier.step_token is not None:
            found[TOKENS] = f"the head of {model} is for {'steps' if pooling.classifier.of_tokens else 'whole prompts'}"
    if no_images is not None:
        found[IMAGES] = f"{model}: {no_images}"
    return {name: told for name, told in found.items() if told} | pooling.lacks
