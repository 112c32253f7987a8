"""From token ids back to text and bytes."""

import re
from collections.abc import Iterable, Sequence
from functools import cached_property

import tokenizers
from tokenizers.decoders import DecodeStream

from rosebatch.core.errors import RowError, unexpected
from rosebatch.text.batch_or_each import batch_or_each

_WORD = re.compile("\u2581[a-zA-Z]+")
_BYTE_PIECE = re.compile(r"<0x[0-9A-F]{2}>")
_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
# Byte-level vocabularies write each byte as a character: a printable byte as itself, the others from 256 on.
BYTES = {chr(byte): byte for byte in _PRINTABLE} | {
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
        """The text of generated tokens, as it goes on behind a prompt: also a space that it begins with."""
        text: str = self.backend.decode([*self._lead, *token_ids], skip_special_tokens=skip_special_tokens)
        return text[self._lead_length :]

    def decode_batch(self, token_ids: Sequence[Sequence[int]], *, skip_special_tokens: bool) -> list[str | RowError]:
        """``decode`` for each sequence, on all cores; a RowError for tokens that have no text."""

        def decode(group: Sequence[Sequence[int]]) -> list[str | RowError]:
            lead, length = self._lead, self._lead_length
            given = [[*lead, *each] for each in group]
            texts = self.backend.decode_batch(given, skip_special_tokens=skip_special_tokens)
            return [text[length:] for text in texts] if length else list(texts)

        return batch_or_each(decode, token_ids, lambda error: unexpected("decoding the answer", error))

    def decode_with_marks(self, token_ids: Sequence[int], marks: Iterable[str]) -> str:
        """The text of generated tokens, without special tokens but these."""
        kept = {self.backend.token_to_id(mark) for mark in marks}
        shown = [token_id for token_id in token_ids if token_id in kept or not self.is_special(token_id)]
        return self.decode(shown, skip_special_tokens=False)

    def stream(self, *, skip_special_tokens: bool) -> DecodeStream:
        """Decodes generated tokens one by one, to the text of ``decode``."""
        found = DecodeStream(skip_special_tokens=skip_special_tokens)
        for token_id in self._lead:
            found.step(self.backend, token_id)
        return found

    def special_ids(self, texts: Iterable[str]) -> frozenset[int]:
        """Ids of the texts that are special tokens."""
        found = map(self.backend.token_to_id, texts)
        return frozenset(token_id for token_id in found if token_id is not None and self.is_special(token_id))

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token, which may end within a character. A special token gives its name."""
        found = self._token_bytes.get(token_id)
        if found is None:
            found = self._token_bytes[token_id] = self._find_bytes(token_id)
        return found

    def _find_bytes(self, token_id: int) -> bytes:
        piece, added = self.backend.id_to_token(token_id) or "", token_id in self._added
        if self._is_byte_level:
            return piece.encode() if added else bytes(BYTES[each] for each in piece if each in BYTES)
        if _BYTE_PIECE.fullmatch(piece) and not added:
            return bytes([int(piece[3:-1], 16)])
        # A normalizer may put a mark for the space in front of added tokens, too.
        return piece.replace("\u2581", " ").encode()

    def is_special(self, token_id: int) -> bool:
        """Whether ``decode`` omits the token."""
        added = self._added.get(token_id)
        return added is not None and added.special

    @cached_property
    def _lead(self) -> tuple[int, ...]:
        """A word to decode before generated tokens, if the decoder drops the space that a text begins with."""
        if not any(each in repr(self.backend.decoder) for each in ("Strip(", "Metaspace(")):
            return ()
        ids = range(self.backend.get_vocab_size())
        found = next((i for i in ids if _WORD.fullmatch(self.backend.id_to_token(i) or "")), None)
        return () if found is None else (found,)

    @cached_property
    def _lead_length(self) -> int:
        return len(self.backend.decode(list(self._lead)))

    @cached_property
    def _added(self) -> dict[int, tokenizers.AddedToken]:
        found: dict[int, tokenizers.AddedToken] = self.backend.get_added_tokens_decoder()
        return found

    @cached_property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in repr(self.backend.decoder)
