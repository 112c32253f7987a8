"""Pairs of texts as prompts of a cross-encoder, in bounded memory."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import tokenizers

from rosebatch.core.errors import RowError
from rosebatch.text.long_texts import LONG, Bound, LongTexts

# Characters of texts that are encoded in one call.
_GROUP = 1 << 18

Pair = tuple[str, str]


def groups_of(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """Pairs that memory has room for. A text that many have in common counts once."""
    group: list[Pair] = []
    seen: set[str] = set()
    size = 0
    for pair in pairs:
        group.append(pair)
        # More of a long one is not encoded with others.
        size += sum(min(len(text), LONG) for text in pair if text not in seen)
        seen.update(pair)
        if size >= _GROUP:
            yield group
            group, seen, size = [], set(), 0
    if group:
        yield group


class _Around(NamedTuple):
    """The tokens that are put around two texts, and the types of theirs, by which ids are moved.

    Attributes:
        front, middle, back: ids and types.
        types: of both texts.
    """

    front: list[tuple[int, int]]
    middle: list[tuple[int, int]]
    back: list[tuple[int, int]]
    types: tuple[int, int]


class TextPairs:
    """Encodes pairs.

    Args:
        backend: encodes texts.
        long_texts: the same for long ones.
    """

    def __init__(self, backend: tokenizers.Tokenizer, long_texts: LongTexts) -> None:
        self._backend, self._long_texts = backend, long_texts
        # A long text that was cut, and what is left: it may be paired with many others.
        self._cut = ("", "")

    def encode(self, group: Sequence[Pair], longest: int | None, bound: Bound, second_text: int) -> list[list[int]]:
        """Token ids of each pair as one prompt; arguments as of ``Tokenizer.encode_pairs``.

        Raises:
            RowError: a text has too many tokens, or takes too much memory.
        """
        texts = list(dict.fromkeys(text for pair in group for text in pair))
        ids = dict(zip(texts, self._long_texts.ids([self._short(text, longest, bound) for text in texts]), strict=True))
        return [self._joined(ids[first], ids[second], longest, second_text) for first, second in group]

    def _short(self, text: str, longest: int | None, bound: Bound) -> str:
        """A text, or of a long one what is needed of it."""
        if len(text) <= LONG or (longest is None and bound.most is None):
            return text
        if text != self._cut[0]:
            kept: str | list[int] | RowError
            if longest is None:
                kept = self._long_texts.encode(text, bound, add_special_tokens=False)
            else:
                kept = self._long_texts.beginning(text, longest, bound)
            if isinstance(kept, RowError):
                raise kept
            self._cut = text, kept if isinstance(kept, str) else text
        return self._cut[1]

    def _joined(self, first: list[int], second: list[int], longest: int | None, moved: int) -> list[int]:
        # Not by the tokenizer: of what it cuts off, it makes pairs of their own, each part with each.
        front, middle, back, types = self._around
        one, two = len(first), len(second)
        room = one + two if longest is None else max(0, longest - len(front) - len(middle) - len(back))
        if one + two > room:
            shorter = min(one, two)
            longer = max(shorter, room - shorter)
            if shorter + longer > room:
                shorter, longer = room // 2, room // 2 + room % 2
            one, two = (shorter, longer) if one <= two else (longer, shorter)
        first, second = (
            [i + moved * kind for i in ids] if moved and kind else ids
            for ids, kind in zip((first[:one], second[:two]), types, strict=True)
        )
        added = ([i + moved * kind for i, kind in each] for each in (front, middle, back))
        return [*next(added), *first, *next(added), *second, *next(added)]

    @cached_property
    def _around(self) -> _Around:
        first = self._backend.encode("a", add_special_tokens=False)
        whole = self._backend.post_process(first, first)
        own = [place for place, is_added in enumerate(whole.special_tokens_mask) if not is_added]
        tokens = list(zip(whole.ids, whole.type_ids, strict=True))
        begin, end = own[len(first) - 1] + 1, own[len(first)]
        types = whole.type_ids[own[0]], whole.type_ids[own[-1]]
        return _Around(tokens[: own[0]], tokens[begin:end], tokens[own[-1] + 1 :], types)
