"""Masks of allowed tokens: which bits belong to which tokens."""

from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray


class MaskLayout:
    """The layout of masks.

    Args:
        known: ids below this are tokens of both the tokenizer and the model.
        num_tokens: of llguidance's tokenizer. It counts tokens, some of which may share an id.
        eos_token_ids: the end tokens that the model can generate.
        added: tokens that stand beside the tokenizer's own vocabulary, such as special ones.

    Attributes:
        num_words: words of a mask for the known tokens.
        num_tokenizer_words: words of a mask for all tokens that llguidance has.
    """

    def __init__(self, known: int, num_tokens: int, eos_token_ids: Collection[int], added: Iterable[int] = ()) -> None:
        self.eos_token_ids = eos_token_ids
        self.known = known
        self.num_words = -(-known // 32)
        self.num_tokenizer_words = -(-num_tokens // 32)
        self._eos_words, self._eos_bits = _bits(eos_token_ids)
        tokenizer_bits = range(known, 32 * self.num_tokenizer_words)
        self._odd_words, self._odd_bits = _bits({*(i for i in added if i < known), *tokenizer_bits})
        # Of the tokenizer: llguidance has no others.
        own_ends = [i for i in eos_token_ids if i < known]
        self._own_end_words, self._own_end_bits = _bits(own_ends)
        self._rare_words, self._rare_bits = _bits({*own_ends, *tokenizer_bits})

    def forced(self, words: NDArray[np.int32]) -> list[tuple[int, int]]:
        """Rows whose only token is an added one, or one that the model lacks, with this token.

        Args:
            words: [R, num_tokenizer_words] int32, a bit for each token of the tokenizer.
        """
        found = []
        for row in _rows_with(words, self._odd_words, self._odd_bits):
            token_ids = np.flatnonzero(np.unpackbits(words[row].view(np.uint8), bitorder="little"))
            if len(token_ids) == 1:
                found.append((row, int(token_ids[0])))
        return found

    def ending(self, words: NDArray[np.int32]) -> list[int]:
        """Rows of which some may end: llguidance allows an end token in these, and where it fails.

        Args:
            words: as of ``forced``.
        """
        return _rows_with(words, self._own_end_words, self._own_end_bits)

    def write(self, masks: NDArray[np.int32], words: NDArray[np.int32], ends: Sequence[int]) -> None:
        """Fill masks.

        Args:
            masks: [R, ceil(vocab_size / 32)] int32.
            words: [R, num_tokenizer_words] int32, a bit for each token of the tokenizer; end tokens are ignored.
            ends: rows in which end tokens are allowed. They are also allowed if nothing else is.
        """
        masks[:, : self.num_words] = words[:, : self.num_words]
        masks[:, self.num_words :] = 0
        if self.known % 32:
            masks[:, self.num_words - 1] &= (1 << self.known % 32) - 1
        masks[:, self._eos_words] &= ~self._eos_bits
        # Only these can have lost all bits.
        rare = _rows_with(words, self._rare_words, self._rare_bits)
        rows = {*ends, *(row for row in rare if not masks[row].any())}
        if rows:
            masks[np.ix_(np.array([*rows]), self._eos_words)] |= self._eos_bits


def _rows_with(words: NDArray[np.int32], places: NDArray[np.intp], bits: NDArray[np.int32]) -> list[int]:
    """Rows that have one of these bits."""
    found: list[int] = np.flatnonzero((words[:, places] & bits).any(axis=1)).tolist()
    return found


def _bits(token_ids: Collection[int]) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
    """The words of a mask that have these tokens, and their bits there."""
    bits = np.zeros(1 + max(token_ids, default=0) // 32, np.uint32)
    for token_id in token_ids:
        bits[token_id // 32] |= np.uint32(1 << token_id % 32)
    words = np.flatnonzero(bits)
    return words, bits[words].view(np.int32)
