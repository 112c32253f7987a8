"""Figures of how much two models differ, from the log-probabilities and tokens that both gave."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

# Of a 95 % interval, in standard deviations.
_Z = 1.959963984540054
# Log-probabilities are fp32: a smaller rest is their rounding.
_LEAST_REST = float(np.finfo(np.float32).eps)
# Positions whose tokens are compared at once.
_POSITIONS = 4096


@dataclass(frozen=True)
class Scores:
    """What a model says about the tokens of texts, the first of each text left out.

    Attributes:
        own: ``[N]`` fp64, log-probability of the text's token, in nats.
        ids: ``[N, K]``, tokens whose log-probabilities are known; -1 where there are fewer.
        logprobs: ``[N, K]`` fp64, of these tokens; -inf where there are fewer.
    """

    own: np.ndarray
    ids: np.ndarray
    logprobs: np.ndarray

    @classmethod
    def of(cls, tokens: Sequence[int], listed: Sequence[Mapping[int, Any]], width: int) -> Self:
        """By a prompt's log-probabilities.

        Args:
            tokens: of the text, without the first.
            listed: of each of them, token id -> ``Logprob``, the text's own token among them.
            width: K.
        """
        own = np.array([known[token].logprob for token, known in zip(tokens, listed, strict=True)])
        ids, logprobs = np.full((len(tokens), width), -1), np.full((len(tokens), width), -np.inf)
        for position, known in enumerate(listed):
            ids[position, : len(known)] = list(known)
            logprobs[position, : len(known)] = [each.logprob for each in known.values()]
        return cls(own, ids, logprobs)

    @classmethod
    def join(cls, scores: Sequence[Self]) -> Self:
        """Of several texts, one after the other."""
        return cls(*(np.concatenate([getattr(each, name) for each in scores]) for name in cls.__dataclass_fields__))

    @property
    def nats(self) -> float:
        """Mean negative log-probability of a token; perplexity is ``exp`` of it."""
        return float(-self.own.mean())


def divergence(reference: Scores, other: Scores) -> np.ndarray:
    """KL divergence of each position in nats, ``[N]``: how much the other's distribution differs.

    Each token that both list is an outcome, and all the rest together is one more outcome. Because outcomes are
    lumped, the divergence of the whole vocabularies is as large or larger. A rest below 1.2e-7 counts as that.
    """
    parts = [slice(start, start + _POSITIONS) for start in range(0, len(reference.own), _POSITIONS)]
    return np.concatenate([_divergence(reference, other, part) for part in parts])


def _divergence(reference: Scores, other: Scores, part: slice) -> np.ndarray:
    ids, known = reference.ids[part], reference.logprobs[part]
    same = (ids[:, :, None] == other.ids[part][:, None, :]) & (ids >= 0)[:, :, None]
    shared = same.any(2)
    theirs = np.take_along_axis(other.logprobs[part], same.argmax(2), 1)
    with np.errstate(invalid="ignore"):
        terms = np.where(shared, np.exp(known) * (known - theirs), 0.0)
    rest, their_rest = (
        np.maximum(1 - np.where(shared, np.exp(each), 0.0).sum(1), _LEAST_REST) for each in (known, theirs)
    )
    return np.asarray(terms.sum(1) + rest * np.log(rest / their_rest))


def agreement(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Share of answers that are equal, and the mean number of tokens before the first difference.

    An answer that is equal counts with all of its tokens.
    """
    pairs = list(zip(ours, theirs, strict=True))
    equal = [list(our) == list(their) for our, their in pairs]
    return float(np.mean(equal)), float(np.mean([_common(our, their) for our, their in pairs]))


def _common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Number of tokens before the first difference."""
    shorter = min(len(ours), len(theirs))
    return next((place for place in range(shorter) if ours[place] != theirs[place]), shorter)


def wilson(right: int, count: int) -> tuple[float, float]:
    """The 95 % interval of a share (source: Wilson 1927, the score interval)."""
    share, square = right / count, _Z * _Z / count
    middle = share + square / 2
    half = _Z * math.sqrt(share * (1 - share) / count + square / count / 4)
    # At both ends, rounding alone leads out of the range.
    return max(0.0, (middle - half) / (1 + square)), min(1.0, (middle + half) / (1 + square))
