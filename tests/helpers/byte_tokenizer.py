"""A tokenizer whose token i is byte i."""

import json
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

BYTES, EOS = 256, 256


def byte_characters() -> dict[int, str]:
    """GPT-2's printable character for each byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + n) for n, b in enumerate(others)}


def byte_backend(*extra: bytes, end: str = "<eos>") -> tokenizers.Tokenizer:
    """After the bytes come the end token and tokens of several bytes, which encoding never produces."""
    characters = byte_characters()
    vocab = {characters[byte]: byte for byte in range(BYTES)} | {end: EOS}
    for i, token in enumerate(extra):
        vocab["".join(characters[byte] for byte in token)] = EOS + 1 + i
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([end])
    return backend


def save_backend(backend: tokenizers.Tokenizer, folder: Path, **config: Any) -> Path:
    """Save a tokenizer into a model's folder, as transformers does; the folder again."""
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
