"""Continuations as requests that are scored: each after the prompt, and from their log-probabilities its score."""

from array import array
from collections.abc import Sequence

import numpy as np

from rosebatch.core.errors import RowError
from rosebatch.core.request import Completion
from rosebatch.core.sampling_params import GREEDY
from rosebatch.core.scoring import Scoring
from rosebatch.core.token_ids import TokenIds
from rosebatch.core.words import counted
from rosebatch.engine.scheduling.servable import prompt_too_long
from rosebatch.io.results import Score
from rosebatch.io.rows import Row
from rosebatch.job.prepared import PreparedPrompt
from rosebatch.job.texts import Encoded


def scored_prompts(row: Row, encoded: Sequence[Encoded], max_model_len: int) -> tuple[PreparedPrompt, ...]:
    """The prompts of a row that is scored.

    Prompt and continuation are encoded together, as a model sees them. What is scored are the tokens from the first on
    that the prompt alone does not have: where they meet, a token may have characters of both. Continuations of a single
    token share one request: they need the same logits.

    Args:
        row: with continuations.
        encoded: the prompt, then the prompt with each continuation that is a text.
        max_model_len: most tokens of a prompt. One with more is not put before a thousand continuations.

    Raises:
        RowError: one of them cannot be encoded, or has no token of its own.
    """
    context, *wholes = (_token_ids("the prompt", each) for each, _ in encoded)
    kept = context[-(row.options.kept(max_model_len) or len(context)) :]
    # The last one is not computed where the prompt itself is scored.
    if len(kept) > max_model_len + 1:
        raise prompt_too_long(counted(len(kept), "token"), max_model_len, is_pooled=True)
    if not row.continuations:
        if len(kept) < 2:
            raise RowError("nothing_to_score", "the prompt has a single token, and no other comes before it")
        return (
            PreparedPrompt(
                TokenIds("I", kept[:-1].tobytes()),
                GREEDY,
                encoded[0][1],
                scoring=Scoring(1, (kept[-1],)),
                continuations=(0,),
            ),
        )
    texts = iter(wholes)
    # Numbers and last tokens of the continuations that follow the same tokens.
    ends: dict[tuple[int, bytes], list[tuple[int, int]]] = {}
    left_out = len(context) - len(kept)
    for number, continuation in enumerate(row.continuations):
        name = f"{row.continuations_name}[{number}]"
        if isinstance(continuation, str):
            whole = next(texts)
            start = _in_common(context, whole) - left_out
            whole = whole[left_out:]
        else:
            # Not of all of the prompt, which may be long.
            start, whole = len(kept), kept + _token_ids(name, continuation)
        start = max(start, 1)
        if start >= len(whole):
            raise RowError("nothing_to_score", f"{name} adds no token to the prompt")
        # Others with the same tokens before the last one differ in where they start at most.
        ends.setdefault((start, whole[:-1].tobytes()), []).append((number, whole[-1]))
    return tuple(
        PreparedPrompt(
            TokenIds("I", before),
            GREEDY,
            encoded[0][1],
            scoring=Scoring(start, tuple(last for _, last in own)),
            continuations=tuple(number for number, _ in own),
        )
        for (start, before), own in ends.items()
    )


def scores_of(prompts: Sequence[PreparedPrompt], completions: Sequence[Completion]) -> list[Score]:
    """The score of each continuation of a row that is scored."""
    found: dict[int, Score] = {}
    for prompt, done in zip(prompts, completions, strict=True):
        own = list(done.prompt_logprobs)
        shared, ends = own[: -len(prompt.continuations)], own[-len(prompt.continuations) :]
        for number, end in zip(prompt.continuations, ends, strict=True):
            tokens = [*shared, end]
            found[number] = Score(
                sum(each.logprob for each in tokens), len(tokens), all(each.rank == 1 for each in tokens)
            )
    return [found[number] for number in sorted(found)]


def _token_ids(name: str, encoded: Sequence[int] | RowError) -> "array[int]":
    if isinstance(encoded, RowError):
        raise encoded
    try:
        return TokenIds.of(encoded)
    except OverflowError:
        raise RowError("invalid_token_id", f"{name} has a token id of no model") from None


def _in_common(context: "array[int]", whole: "array[int]") -> int:
    """How many tokens both begin with."""
    length = min(len(context), len(whole))
    differs = np.frombuffer(context, np.uint32, length) != np.frombuffer(whole, np.uint32, length)
    return int(differs.argmax()) if differs.any() else length
