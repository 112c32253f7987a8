"""Keeps completions from tokens and words that a row rules out."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rosebatch.core.request import Constraint, feed_rows, fill_rows
from rosebatch.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Bans:
    """What a row rules out. Rows with the same rules share it.

    Attributes:
        allowed: mask ``[ceil(V / 32)]`` int32 of the tokens that may come, token 0 in the lowest bit.
        ends: mask of the end tokens, which may come where nothing else may.
        stops: mask of the tokens that do not come before ``min_tokens``.
        min_tokens: so many.
        words: sequences of tokens whose last one is ruled out after the others.
        after: these last ones by the others.
        lengths: of the others.
    """

    allowed: NDArray[np.int32]
    ends: NDArray[np.int32]
    stops: NDArray[np.int32]
    min_tokens: int
    words: tuple[tuple[int, ...], ...]
    after: Mapping[tuple[int, ...], Sequence[int]]
    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        """Tokens that have to be remembered."""
        return max(self.lengths, default=0)


@lru_cache(64)
def find_bans(
    tokenizer: Tokenizer | None,
    bad_words: tuple[str, ...],
    allowed_token_ids: tuple[int, ...] | None,
    vocab_size: int,
    end_ids: frozenset[int],
    stop_ids: frozenset[int] = frozenset(),
    min_tokens: int = 0,
) -> Bans:
    """The rules of a row.

    Args:
        tokenizer: needed for words.
        bad_words: each is ruled out as it is encoded alone, and after a space.
        allowed_token_ids: None for all.
        vocab_size: width of the model's logits.
        end_ids: the model's end tokens.
        stop_ids: that end the row's completions.
        min_tokens: before so many, none of them comes.
    """
    allowed = np.ones(-(-vocab_size // 32) * 32, bool)
    if allowed_token_ids is not None:
        allowed[:] = False
        allowed[list(allowed_token_ids)] = True
    words: dict[tuple[int, ...], None] = {}
    for word in bad_words:
        assert tokenizer is not None, "words are refused without one"
        for text in (word, f" {word.lstrip()}"):
            words[tuple(tokenizer.backend.encode(text, add_special_tokens=False).ids)] = None
    ends, stops = np.zeros_like(allowed), np.zeros_like(allowed)
    for mask, ids in ((ends, end_ids), (stops, stop_ids)):
        mask[[i for i in ids if 0 <= i < vocab_size]] = True
    # A tokenizer may have more tokens than the model has logits: such a word cannot come.
    known = tuple(word for word in words if word and max(word) < vocab_size)
    after = defaultdict[tuple[int, ...], list[int]](list)
    for tokens in known:
        after[tokens[:-1]].append(tokens[-1])
    # A word of one token never comes.
    allowed[after.pop((), [])] = False
    return Bans(_packed(allowed), _packed(ends), _packed(stops), min_tokens, known, after, tuple(set(map(len, after))))


class BanConstraint:
    """Follows one completion (see ``rosebatch.core.request.Constraint``).

    Args:
        bans: of its row.
        inner: starts what the completion has to match besides; None for nothing.
    """

    def __init__(self, bans: Bans, inner: Callable[[], Constraint] | None) -> None:
        self._bans = bans
        self._inner = None if inner is None else inner()
        self._last: tuple[int, ...] = ()
        self._length = 0
        self._error: str | None = None

    @property
    def error(self) -> str | None:
        """See ``Constraint``."""
        return self._error if self._inner is None else self._inner.error or self._error

    @property
    def forces(self) -> bool:
        """See ``Constraint``."""
        return self._inner is not None and self._inner.forces

    @classmethod
    def fill_all(cls, constraints: "Sequence[BanConstraint]", masks: Any) -> None:
        """See ``Constraint``."""
        masks[:] = -1
        fill_rows({row: each._inner for row, each in enumerate(constraints) if each._inner is not None}, masks)
        for mask, each in zip(masks, constraints, strict=True):
            mask &= each._bans.allowed
            for token_id in each._banned():
                mask[token_id // 32] &= ~_bit(token_id)
            if not mask.any():
                mask[:] = each._bans.ends
            early = each._length < each._bans.min_tokens
            if not (mask & ~each._bans.stops if early else mask).any():
                why = "bad_words, allowed_token_ids and min_tokens" if early else "bad_words and allowed_token_ids"
                each._error = f"all tokens are ruled out by {why}, for token {each._length + 1} of the answer"

    def feed(self, token_id: int) -> bool:
        """See ``Constraint``."""
        self._count(token_id)
        return self._inner is not None and self._inner.feed(token_id)

    @classmethod
    def feed_all(cls, constraints: "Sequence[BanConstraint]", token_ids: Sequence[int]) -> list[bool]:
        """See ``Constraint``."""
        for each, token_id in zip(constraints, token_ids, strict=True):
            each._count(token_id)
        inner = {row: each._inner for row, each in enumerate(constraints) if each._inner is not None}
        return feed_rows(inner, token_ids)

    def follow(self, token_id: int) -> tuple[list[int], bool]:
        """See ``Constraint``."""
        return [token_id], self.feed(token_id)

    def rest(self) -> Sequence[int]:
        """See ``Constraint``."""
        return ()

    def ahead(self, token_ids: Sequence[int]) -> Sequence[Constraint]:
        """See ``Constraint``."""
        return ()

    def _count(self, token_id: int) -> None:
        self._length += 1
        if longest := self._bans.longest:
            self._last = (*self._last, token_id)[-longest:]

    def _banned(self) -> Iterable[int]:
        """The tokens that would complete a word."""
        for length in self._bans.lengths:
            yield from self._bans.after.get(self._last[-length:], ())


def _packed(allowed: Collection[bool]) -> NDArray[np.int32]:
    return np.packbits(np.asarray(allowed, bool), bitorder="little").view(np.int32)


def _bit(token_id: int) -> np.int32:
    return np.uint32(1 << token_id % 32).view(np.int32)
