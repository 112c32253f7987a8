"""Texts that begin alike, as with an instruction for all rows: the beginning is encoded once.

It ends where a long text may be cut, so token ids are those of each text as a whole.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

from rosebatch.text.long_texts import AROUND, LongTexts

# Characters that need not be encoded, for which a beginning is looked for. That takes a few short encodings.
_WORTH = 1 << 17
# Characters before the end of what is shared in which a cut is looked for: what is behind it is encoded for each text.
_SEARCHED = (64, 256, 1024)


class _Beginning(NamedTuple):
    """What texts begin with.

    Attributes:
        seen: with the characters behind the cut, on which the cut depends.
        rest: where the rest of a text begins.
        ids: the token ids before the cut.
    """

    seen: str
    rest: int
    ids: list[int]


class SharedBeginnings:
    """Encodes texts that begin alike, and remembers the last beginning.

    Args:
        texts: encodes their parts, and finds where to cut.
    """

    def __init__(self, texts: LongTexts) -> None:
        self._texts = texts
        self._last = _Beginning("", 0, [])

    def encode(self, texts: Sequence[str], *, add_special_tokens: bool) -> list[list[int]] | None:
        """Token ids of each text, as the tokenizer gives them for it as a whole; None if they share too little."""
        first, last = min(texts, default=""), max(texts, default="")
        shared = length_in_common(first, last)
        known = self._last
        fits = shared >= len(known.seen) and first.startswith(known.seen)
        if (shared - (known.rest if fits else 0)) * (len(texts) - 1) >= _WORTH:
            found = self._find(first, shared)
            known, fits = (found, True) if found is not None else (known, fits)
        if not fits or not known.rest:
            return None
        self._last = known
        front, back = self._texts.added if add_special_tokens else ([], [])
        rests = self._texts.ids([text[known.rest :] for text in texts])
        return [[*front, *known.ids, *ids, *back] for ids in rests]

    def _find(self, text: str, shared: int) -> _Beginning | None:
        """The beginning up to a cut before the end of what is shared; None if there is no cut."""
        end = shared - AROUND
        cuts = (self._texts.cut(text, max(0, end - searched), end) for searched in _SEARCHED)
        cut = next(filter(None, cuts), None)
        if cut is None:
            return None
        before, behind = cut
        ids, rest, whole = self._texts.ids([text[:before], text[behind:], text])
        # One text is compared, whatever the rule of cuts says of this tokenizer.
        return _Beginning(text[: behind + AROUND], behind, ids) if ids + rest == whole else None


def length_in_common(first: Sequence[Any], second: Sequence[Any]) -> int:
    """How many items both begin with, such as characters."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
