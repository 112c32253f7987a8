"""Token ids of long texts in bounded memory: a tokenizer takes up to 300 bytes for each byte that it encodes at once.

A text is cut between words, and encoded piece by piece. All tokens are in the vocabulary: where none has both
characters beside a cut, none reaches across it. A tokenizer may also look ahead for the end of a word, or put a space
in front of each text. So the characters around a cut are encoded together and apart, which must give the same.
"""

import re
from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import tokenizers
from tokenizers import models

from rosebatch.core.errors import RowError
from rosebatch.text.vocabulary import BYTES

# Characters of a text that is encoded in pieces, and about those of a piece.
LONG = 1 << 17
_PIECE, _SHORTEST = 1 << 16, 1 << 15
# Characters in which a cut is looked for, and places that are tried.
_SEARCHED = 4 * _PIECE
_MAX_TRIES = 16
# Characters on each side that are encoded to try a place.
AROUND = 128
# A cut at any other place adds fewer tokens.
_TOKENS_OF_A_CUT = 256
# A space or line break between words. Behind a character that tokenizers write for a space, it is one of several.
_MARK = re.compile("[ \n](?<=[^\\s\u2581].)(?=\\S)", re.DOTALL)
# In a vocabulary, where tokens of bytes have others for the two: what precedes a space, and what follows a line break.
_BEFORE_SPACE = re.compile("([^ \u0120\u2581\0])[ \u0120\u2581]")
_BEHIND_BREAK = re.compile("(?<=[\n\u010a])[^\0]")


class Bound(NamedTuple):
    """How many token ids of a text are wanted.

    Attributes:
        last: so many, of its end; 0 for all.
        most: a text that has more is refused; None for any number. Without meaning for the last ones.
        refusal: what is then the result.
        most_at_once: characters of a text that may be encoded as a whole, where it cannot be cut; None for any number.
    """

    last: int = 0
    most: int | None = None
    refusal: RowError | None = None
    most_at_once: int | None = None


UNBOUND = Bound()


class Piece(NamedTuple):
    """A part of a text, and whether it may be encoded apart from what precedes it."""

    begin: int
    end: int
    is_apart: bool = True


class LongTexts:
    """Encodes texts of any length.

    Args:
        backend: encodes short ones.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        # The last text that was refused, and how many tokens it may have: rows of a table may have one in common.
        self._refused: tuple[str, int | None] = "", None

    def encode(self, text: str, bound: Bound, *, add_special_tokens: bool) -> list[int] | RowError:
        """Token ids, as the tokenizer gives them for the text as a whole.

        A text that cannot be cut is encoded as a whole, if the number of tokens may be within the bound.
        """
        front, back = self.added if add_special_tokens else ([], [])
        if bound.last:
            ends = self._last(text, list(self.pieces(text)), front, back, bound.last)
            return ends or _too_long(text, bound) or self._whole(text, add_special_tokens)[-bound.last :]
        if (text, bound.most) == self._refused and bound.refusal is not None:
            return bound.refusal
        most, is_exact = bound.most, True
        ids = array("I", front)
        # Those behind the last one that is needed are not looked for: of a text that is refused, nearly all.
        for piece in self.pieces(text):
            if is_exact and not piece.is_apart:
                is_exact = False
                if most is None:
                    break
                most = 2 * most + _TOKENS_OF_A_CUT * (1 + len(text) // _SHORTEST)
            ids.extend(self._ids_of(text[piece.begin : piece.end]))
            if most is not None and len(ids) + len(back) > most:
                assert bound.refusal is not None
                self._refused = text, bound.most
                return bound.refusal
        if is_exact:
            return [*ids, *back]
        return _too_long(text, bound) or self._whole(text, add_special_tokens)

    def beginning(self, text: str, count: int, bound: Bound) -> str | RowError:
        """The beginning of a text that has more than so many tokens, if the text has: these are its first tokens.

        A text that cannot be cut is there as a whole; the result is an error if it takes too much memory.
        """
        found = end = 0
        for piece in self.pieces(text):
            if not piece.is_apart:
                return _too_long(text, bound) or text
            if found > count:
                return text[:end]
            found += len(self._ids_of(text[piece.begin : piece.end]))
            end = piece.end
        return text

    def _last(self, text: str, pieces: list[Piece], front: list[int], back: list[int], count: int) -> list[int]:
        """So many last token ids, or all if there are fewer; none where the text cannot be cut."""
        found = back
        for piece in reversed(pieces):
            if not piece.is_apart:
                return []
            found = self._ids_of(text[piece.begin : piece.end]) + found
            if len(found) >= count:
                return found[-count:]
        return (front + found)[-count:]

    def _whole(self, text: str, add_special_tokens: bool) -> list[int]:
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def _ids_of(self, text: str) -> list[int]:
        return self._whole(text, add_special_tokens=False)

    def ids(self, parts: Sequence[str]) -> list[list[int]]:
        """Token ids of short parts of texts, without those that are put around a text."""
        return [each.ids for each in self._backend.encode_batch_fast(list(parts), add_special_tokens=False)]

    def pieces(self, text: str) -> Iterator[Piece]:
        """The parts in which a text is encoded."""
        begin, is_apart = 0, True
        while len(text) - begin > _PIECE:
            cut = self.cut(text, begin + _SHORTEST, begin + _SEARCHED)
            end, behind = cut or (begin + _PIECE, begin + _PIECE)
            yield Piece(begin, end, is_apart)
            begin, is_apart = behind, cut is not None
        yield Piece(begin, len(text), is_apart)

    def cut(self, text: str, first: int, last: int) -> tuple[int, int] | None:
        """Where a piece may end and the next one may begin, which may leave out a space; None if there is no place.

        The place is from ``first`` to ``last``. No more than ``AROUND`` characters on each side of it are looked at.
        """
        found = _MARK.finditer(text, first, last)
        for mark in islice((each for each in found if each[0] in self._marks), _MAX_TRIES):
            at, behind = mark.span()
            if mark[0] == " ":
                before = text[at - 1]
                if self._before_space.isdisjoint((before.encode()[-1], before.lower().encode()[-1])):
                    next_begin = next((place for place in (at, behind) if self._is_apart(text, at, place)), None)
                    if next_begin is not None:
                        return at, next_begin
            elif text[behind].encode()[0] not in self._behind_break and self._is_apart(text, behind, behind):
                return behind, behind
        return None

    def _is_apart(self, text: str, end: int, begin: int) -> bool:
        """Whether the text up to one place and from another have together the tokens that they have apart."""
        first, last = max(0, end - AROUND), begin + AROUND
        return self._ids_of(text[first:end]) + self._ids_of(text[begin:last]) == self._ids_of(text[first:last])

    @cached_property
    def _marks(self) -> str:
        """The marks to cut at. Unigram needs ends of words: rounding orders equal sums of scores within a word.

        Words of a fixed length are counted from the beginning of the text.
        """
        words = self._backend.pre_tokenizer
        marks = "" if words is not None and b"FixedLength" in words.__getstate__() else " \n"
        if not isinstance(self._backend.model, models.Unigram):
            return marks
        return "".join(mark for mark in marks if self._splits(f"a{mark}a"))

    def _splits(self, text: str) -> bool:
        """Whether a text is more than one word."""
        normalizer, words = self._backend.normalizer, self._backend.pre_tokenizer
        normalized = text if normalizer is None else normalizer.normalize_str(text)
        return words is not None and len(words.pre_tokenize_str(normalized)) > 1

    @cached_property
    def added(self) -> tuple[list[int], list[int]]:
        """The tokens that the tokenizer puts in front of each text and behind it."""
        encoded = self._backend.encode("a")
        own = [place for place, is_added in enumerate(encoded.special_tokens_mask) if not is_added]
        return encoded.ids[: own[0]], encoded.ids[own[-1] + 1 :]

    @cached_property
    def _before_space(self) -> set[int]:
        """The last bytes of characters before a space in tokens, as UTF-8; in doubt, too many."""
        found = set(_BEFORE_SPACE.findall(self._vocabulary))
        return {each.encode()[-1] for each in found} | {BYTES[each] for each in found if each in BYTES}

    @cached_property
    def _behind_break(self) -> set[int]:
        """The first bytes of characters behind a line break."""
        found = set(_BEHIND_BREAK.findall(self._vocabulary))
        return {each.encode()[0] for each in found} | {BYTES[each] for each in found if each in BYTES}

    @property
    def _vocabulary(self) -> str:
        """All tokens but those that are looked for in a text first: around a cut, these are seen."""
        added = {each.content for each in self._backend.get_added_tokens_decoder().values()}
        return "\0".join(self._backend.get_vocab(with_added_tokens=False).keys() - added)


def _too_long(text: str, bound: Bound) -> RowError | None:
    """The error of a text that takes too much memory as a whole."""
    if bound.most_at_once is None or len(text) <= bound.most_at_once:
        return None
    return RowError(
        "prompt_too_long",
        f"the prompt has {len(text)} characters that cannot be encoded a part at a time, and at once no more than "
        f"{bound.most_at_once}; a larger --max-inflight-bytes allows more",
    )
