"""From token ids back to text and bytes."""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property

import tokenizers

from rosebatch.core.errors import RowError, unexpected
from rosebatch.text.batch_or_each import batch_or_each

_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
# Byte-level vocabularies write each byte as a character: a printable byte as itself, the others from 256 on.
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
    chr(256 + number): byte for number, byte in enumerate(byte for byte in range(256) if byte not in _PRINTABLE)
}


class Vocabulary:
    """The tokens of a model.

    Args:
        backend: encodes and decodes.
    """

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self.backend = backend
        self._token_bytes: dict[int, bytes] = {}

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of generated tokens."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def decode_batch(
        self, token_ids: Sequence[Sequence[int]], *, skip_special_tokens: bool = True
    ) -> list[str | RowError]:
        """``decode`` for each sequence, on all cores; a RowError for tokens that have no text."""

        def decode(group: Sequence[Sequence[int]]) -> list[str | RowError]:
            return list(self.backend.decode_batch([*map(list, group)], skip_special_tokens=skip_special_tokens))

        return batch_or_each(decode, token_ids, lambda error: unexpected("decoding the answer", error))

    def decode_with_marks(self, token_ids: Sequence[int], marks: Iterable[str]) -> str:
        """The text of generated tokens, without special tokens but these."""
        kept = {self.backend.token_to_id(mark) for mark in marks}
        shown = [token_id for token_id in token_ids if token_id in kept or not self.is_special(token_id)]
        return self.backend.decode(shown, skip_special_tokens=False)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may end within a character. A special token gives its name."""
        found = self._token_bytes.get(token_id)
        if found is None:
            found = self._token_bytes[token_id] = self._find_bytes(token_id)
        return found

    def _find_bytes(self, token_id: int) -> bytes:
        piece = self.backend.id_to_token(token_id) or ""
        if token_id in self._added:
            return piece.encode()
        if self._is_byte_level:
            return bytes(_BYTES[character] for character in piece if character in _BYTES)
        if _BYTE_PIECE.fullmatch(piece):
            return bytes([int(piece[3:-1], 16)])
        return piece.replace("\u2581", " ").encode()

    def is_special(self, token_id: int) -> bool:
        """Whether ``decode`` omits the token."""
        added = self._added.get(token_id)
        return added is not None and added.special

    @cached_property
    def _added(self) -> dict[int, tokenizers.AddedToken]:
        found: dict[int, tokenizers.AddedToken] = self.backend.get_added_tokens_decoder()
        return found

    @cached_property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in repr(self.backend.decoder)
