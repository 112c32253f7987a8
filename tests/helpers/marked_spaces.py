"""Tokenizers like Llama 2's: a mark for the space before each text, and bytes for what has no token."""

from collections.abc import Sequence
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers

BYTE_PIECES = [f"<0x{byte:02X}>" for byte in range(256)]


def marked_spaces(
    pieces: Sequence[str], merges: Sequence[tuple[str, str]], special: Sequence[str | AddedToken], **options: Any
) -> tokenizers.Tokenizer:
    """Ids count the pieces, of which ``<unk>`` is one; its decoder drops the first space of a text."""
    vocab = {piece: number for number, piece in enumerate(pieces)}
    model = models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, **options)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    backend.add_special_tokens(special)
    return backend
