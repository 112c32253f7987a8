"""From the tokenizer of a .gguf file to tokenizer.json and tokenizer_config.json, in transformers' format."""

import json
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from rosebatch.host.model_files import refusal, refused, shown
from rosebatch.host.pretrained import load_pretrained_tokenizer

_SPLIT_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SPLIT_HEAD = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"


class _TokenType(IntEnum):
    CONTROL = 3
    USER_DEFINED = 4


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _split(digits: str) -> Any:
    split = pre_tokenizers.Split(Regex(_SPLIT_HEAD + digits + "|" + _SPLIT_TAIL), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# Values of tokenizer.ggml.pre, from llama.cpp: how text is split before byte-pair merges.
_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _split(r"\p{N}{1,3}"),
    "qwen2": lambda: _split(r"\p{N}"),
}


def write_tokenizer(get: Callable[..., Any], path: Path, folder: Path) -> None:
    """Write both files into ``folder``.

    Args:
        get: returns metadata of the GGUF file by key, with an optional default.
        path: the GGUF file, for errors.
        folder: the target.

    Raises:
        UserError: the tokenizer is not supported or lacks metadata.
    """
    kind, pre = get("tokenizer.ggml.model"), get("tokenizer.ggml.pre", "default")
    if kind == "llama":
        _write_sentencepiece(path, folder)
        return
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise refusal(
            path, f"tokenizer {shown(kind)} with pre-tokenizer {shown(pre)} is not supported; supported are {known}"
        )
    for key in ("tokenizer.ggml.tokens", "tokenizer.ggml.merges"):
        if get(key) is None:
            raise refusal(path, f"GGUF metadata {key!r} is missing")
    tokens: list[str] = get("tokenizer.ggml.tokens")
    types: list[int] = get("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(merge.split(" ", 1)) for merge in get("tokenizer.ggml.merges")]
    if bad := next((merge for merge in merges if len(merge) != 2), None):
        raise refusal(path, f"the merge {shown(bad[0])} is no pair of tokens")
    llama3 = pre == "llama-bpe"
    vocab = {token: i for i, token in enumerate(tokens)}
    # Llama 3 takes whole words of its vocabulary before it tries merges, and starts every prompt with a BOS.
    bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=llama3)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    added = ((t, k) for t, k in zip(tokens, types, strict=True) if k in (_TokenType.CONTROL, _TokenType.USER_DEFINED))
    for token, token_type in added:
        special = token_type == _TokenType.CONTROL
        entry = [AddedToken(token, special=special, normalized=False)]
        tokenizer.add_special_tokens(entry) if special else tokenizer.add_tokens(entry)

    def added_to_prompts(name: str, default: bool) -> str:
        """The token that every prompt gets; empty for none."""
        is_added = get(f"tokenizer.ggml.add_{name}_token", default)
        return tokens[get(f"tokenizer.ggml.{name}_token_id")] if is_added else ""

    bos, eos = added_to_prompts("bos", llama3), added_to_prompts("eos", False)
    if bos or eos:
        template = processors.TemplateProcessing(
            single=f"{bos} $A {eos}".strip(),
            pair=f"{bos} $A $B {eos}".strip(),
            special_tokens=[(token, tokenizer.token_to_id(token)) for token in dict.fromkeys([bos, eos]) if token],
        )
        tokenizer.post_processor = processors.Sequence([tokenizer.post_processor, template])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: get(f"tokenizer.ggml.{key}_token_id") for name, key in named.items()}
    config: dict[str, Any] = {name: tokens[i] for name, i in ids.items() if i is not None}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if template := get("tokenizer.chat_template"):
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_sentencepiece(path: Path, folder: Path) -> None:
    """Let transformers convert a sentencepiece vocabulary."""
    with (
        refused(path, "the tokenizer cannot be converted"),
        # Alone in a folder: transformers would also read a tokenizer_config.json next to the file, for example.
        TemporaryDirectory() as alone,
    ):
        (Path(alone) / "model.gguf").symlink_to(path.resolve())
        load_pretrained_tokenizer(Path(alone), gguf_file="model.gguf").save_pretrained(str(folder))
