"""Where in its text each token of a prompt is."""

from array import array
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import tokenizers

from rosebatch.text.long_texts import LongTexts

# Place of a token that stands for no text.
_NOWHERE = -1


class Spans:
    """The first character of each token, and the one after its last; None for both of a token without text."""

    def __init__(self) -> None:
        self._starts, self._ends = array("i"), array("i")

    def add(self, start: int, end: int) -> None:
        """Another token's."""
        self._starts.append(start)
        self._ends.append(end)

    def add_nowhere(self, count: int) -> None:
        """So many tokens without text."""
        self._starts.extend([_NOWHERE] * count)
        self._ends.extend([_NOWHERE] * count)

    def last(self, count: int) -> "Spans":
        """Those of the last tokens."""
        found = Spans()
        found._starts, found._ends = (each[len(each) - count :] for each in (self._starts, self._ends))
        return found

    def __iter__(self) -> Iterator[tuple[int, int] | tuple[None, None]]:
        for start, end in zip(self._starts, self._ends, strict=True):
            yield (None, None) if start == _NOWHERE else (start, end)


class EncodedText(NamedTuple):
    """A prompt with the text that it is of, or the last tokens of that.

    Attributes:
        is_whole: whether the text has all of its tokens, such as a chat that a template has written.
    """

    text: str
    token_ids: Sequence[int]
    is_whole: bool


def find_spans(backend: tokenizers.Tokenizer, long_texts: LongTexts, prompt: EncodedText) -> Spans:
    """The places of all tokens, by encoding the text once more; no places in a long text that cannot be cut.

    Args:
        backend: encodes parts of the text, one after the other: each takes up to 300 times its bytes.
        long_texts: cuts the text.
        prompt: with its text.
    """
    front, back = ([], []) if prompt.is_whole else long_texts.added
    found, ids, end = Spans(), [*front], 0
    found.add_nowhere(len(front))
    for piece in long_texts.pieces(prompt.text):
        encoding = backend.encode(prompt.text[piece.begin : piece.end], add_special_tokens=False)
        ids += encoding.ids
        for number, (first, last) in enumerate(encoding.offsets):
            # The space that a cut leaves out is its first token's.
            found.add((piece.begin if number else end) + first, piece.begin + last)
        end = piece.end
    ids += back
    found.add_nowhere(len(back))
    count = len(prompt.token_ids)
    if ids[len(ids) - count :] == list(prompt.token_ids):
        return found.last(count)
    unknown = Spans()
    unknown.add_nowhere(count)
    return unknown
