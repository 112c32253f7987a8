"""Masks of allowed tokens: which bits belong to which tokens."""

import json
from collections.abc import Collection, Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from rosebatch.text.grammar_check import TokenTable
from rosebatch.text.tokenizer import Tokenizer


class MaskLayout:
    """The layout of masks.

    Args:
        token_ids: of the tokenizer.
        vocab_size: width of the model's logits.
        eos_token_ids: the model's end tokens.
        added: tokens that stand beside the tokenizer's own vocabulary, such as special ones.

    Attributes:
        eos_token_ids: the end tokens that the model can generate.
        known: ids below this are tokens of both the tokenizer and the model.
        num_words: words of a mask for the known tokens.
        num_tokenizer_words: words of a mask for all tokens that llguidance has, see ``_without_gaps``.
    """

    def __init__(
        self,
        token_ids: Collection[int],
        vocab_size: int,
        eos_token_ids: Iterable[int],
        added: Iterable[int] = (),
    ) -> None:
        self.eos_token_ids = frozenset(i for i in eos_token_ids if 0 <= i < vocab_size)
        self.known = min(1 + max(token_ids, default=-1), vocab_size)
        self.num_words = -(-self.known // 32)
        beyond = sum(i >= self.known for i in token_ids)
        self.num_tokenizer_words = -(-(self.known + beyond) // 32)
        self._has_gaps = len({i for i in token_ids if i < self.known}) < self.known
        self._eos_words, self._eos_bits = _bits(self.eos_token_ids)
        tokenizer_bits = range(self.known, 32 * self.num_tokenizer_words)
        self._odd_words, self._odd_bits = _bits({*(i for i in added if i < self.known), *tokenizer_bits})

    def table(self, tokenizer: Tokenizer) -> TokenTable:
        """What another process needs of the tokenizer."""
        ends = sorted(i for i in self.eos_token_ids if i < self.known)
        return TokenTable(_without_gaps(tokenizer, self.known) if self._has_gaps else tokenizer.backend.to_str(), ends)

    def forced(self, words: NDArray[np.int32]) -> list[tuple[int, int]]:
        """Rows whose only token is an added one, or one that the model lacks, with this token.

        Args:
            words: [R, num_tokenizer_words] int32, a bit for each token of the tokenizer.
        """
        found = []
        for row in np.flatnonzero((words[:, self._odd_words] & self._odd_bits).any(axis=1)).tolist():
            token_ids = np.flatnonzero(np.unpackbits(words[row].view(np.uint8), bitorder="little"))
            if len(token_ids) == 1:
                found.append((row, int(token_ids[0])))
        return found

    def write(self, masks: NDArray[np.int32], words: NDArray[np.int32], ends: Sequence[bool]) -> None:
        """Fill masks.

        Args:
            masks: [R, ceil(vocab_size / 32)] int32.
            words: [R, num_tokenizer_words] int32, a bit for each token of the tokenizer; end tokens are ignored.
            ends: R, whether end tokens are allowed. They are also allowed if nothing else is.
        """
        masks[:, : self.num_words] = words[:, : self.num_words]
        masks[:, self.num_words :] = 0
        if self.known % 32:
            masks[:, self.num_words - 1] &= (1 << self.known % 32) - 1
        masks[:, self._eos_words] &= ~self._eos_bits
        rows = np.flatnonzero(np.array(ends) | ~masks.any(axis=1))
        masks[np.ix_(rows, self._eos_words)] |= self._eos_bits


def _bits(token_ids: Collection[int]) -> tuple[NDArray[np.intp], NDArray[np.int32]]:
    """The words of a mask that have these tokens, and their bits there."""
    bits = np.zeros(1 + max(token_ids, default=0) // 32, np.uint32)
    for token_id in token_ids:
        bits[token_id // 32] |= np.uint32(1 << token_id % 32)
    words = np.flatnonzero(bits)
    return words, bits[words].view(np.int32)


def _without_gaps(tokenizer: Tokenizer, count: int) -> str:
    """The tokenizer as JSON, without gaps in the first ``count`` ids: special tokens, which no text has, fill them.

    llguidance takes the number of tokens for the end of their ids.
    """
    vocab = tokenizer.backend.get_vocab()
    fillers = {f"<|no token {i}|>": i for i in sorted(set(range(count)).difference(vocab.values()))}
    content = json.loads(tokenizer.backend.to_str())
    content["model"]["vocab"] = vocab | fillers
    form = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    content["added_tokens"] += [{"id": i, "content": text, **form} for text, i in fillers.items()]
    return json.dumps(content)
