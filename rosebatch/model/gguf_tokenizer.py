"""From the tokenizer of a .gguf file to tokenizer.json and tokenizer_config.json, in transformers' format."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from rosebatch.host.model_files import refusal, refused, shown
from rosebatch.host.pretrained import load_pretrained_tokenizer
from rosebatch.model.gguf_metadata import Metadata

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


# Texts of tokens that end an answer, whatever the file's keys say: llama.cpp's list.
_END_TEXTS = {
    *("</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "<|im_end|>", "<|return|>"),
    *("<|eot_id|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "<end_of_turn>", "<turn|>", "<end_of_utterance>"),
    *("<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>"),
    *("[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
}
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
_MARK = re.compile(r"<\|[^|<>]+\|>")
# Read by name where a prompt needs them, or not used by these kinds of tokenizers.
_HARMLESS = (
    *("scores", "add_space_prefix", "remove_extra_whitespaces", "mask_token_id", "seperator_token_id", "cls_token_id"),
    *(f"fim_{name}_token_id" for name in ("pre", "suf", "mid")),
    *("prefix_token_id", "suffix_token_id", "middle_token_id"),
)


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """The tokenizer of a .gguf file.

    Attributes:
        backend: encodes and decodes.
        config: of tokenizer_config.json.
        end_ids: tokens that end an answer, the file's own first.
    """

    backend: Tokenizer
    config: dict[str, Any]
    end_ids: list[int]

    def save(self, folder: Path) -> None:
        """Write both files."""
        self.backend.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")


def read_tokenizer(metadata: Metadata, path: Path) -> GGUFTokenizer:
    """Make the tokenizer of a file.

    Args:
        metadata: of the file.
        path: the file, for errors.

    Raises:
        UserError: the tokenizer is not supported or lacks metadata.
    """

    def get(name: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{name}", default)

    kind, pre = get("model"), get("pre", "default")
    if kind != "llama" and (kind != "gpt2" or pre not in _PRE_TOKENIZERS):
        known = ", ".join(_PRE_TOKENIZERS)
        raise refusal(
            path, f"tokenizer {shown(kind)} with pre-tokenizer {shown(pre)} is not supported; supported are {known}"
        )
    tokens: list[str] = metadata.need("tokenizer.ggml.tokens")
    types: list[int] = get("token_type", [1] * len(tokens))
    backend = _sentencepiece(path, get) if kind == "llama" else _byte_level(path, tokens, metadata, pre)
    for name in _HARMLESS:
        get(name)
    metadata.require("tokenizer.ggml.add_sep_token", False)
    metadata.require("tokenizer.ggml.token_type_count", 0, 1)
    keyed = [get(f"{name}_token_id") for name in _END_KEYS]
    end_ids = [i for i in keyed if i is not None]
    end_ids = list(dict.fromkeys([*end_ids, *(i for i, token in enumerate(tokens) if token in _END_TEXTS)]))
    templates = _templates(metadata)
    marks = set(_MARK.findall("".join(templates.values())))
    controls = {tokens[i] for i in end_ids}
    for token, token_type in zip(tokens, types, strict=True):
        # Some files call marks words, or unused.
        is_control = token_type == _TokenType.CONTROL or token in controls
        if is_control or (token in marks and token_type != _TokenType.USER_DEFINED):
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False)])
        elif token_type == _TokenType.USER_DEFINED:
            backend.add_tokens([AddedToken(token, special=False, normalized=False)])
    _add_to_prompts(backend, get, tokens, bos=kind == "llama" or pre == "llama-bpe")
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: get(f"{key}_token_id") for name, key in named.items()}
    config: dict[str, Any] = {name: tokens[i] for name, i in ids.items() if i is not None}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if templates:
        config["chat_template"] = [{"name": name, "template": each} for name, each in templates.items()]
    return GGUFTokenizer(backend, config, end_ids)


def _byte_level(path: Path, tokens: list[str], metadata: Metadata, pre: str) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.need("tokenizer.ggml.merges")]
    if bad := next((merge for merge in merges if len(merge) != 2), None):
        raise refusal(path, f"the merge {shown(bad[0])} is no pair of tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    # Llama 3 takes whole words of its vocabulary before it tries merges.
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(path: Path, get: Callable[..., Any]) -> Tokenizer:
    """Let transformers convert a sentencepiece vocabulary."""
    get("merges")
    with (
        refused(path, "the tokenizer cannot be converted"),
        # Alone in a folder: transformers would also read a tokenizer_config.json next to the file, for example.
        TemporaryDirectory() as alone,
    ):
        (Path(alone) / "model.gguf").symlink_to(path.resolve())
        backend: Tokenizer = load_pretrained_tokenizer(Path(alone), gguf_file="model.gguf").backend_tokenizer
    if not get("add_space_prefix", True):
        backend.pre_tokenizer = pre_tokenizers.Metaspace("\u2581", prepend_scheme="never", split=False)
        backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _add_to_prompts(backend: Tokenizer, get: Callable[..., Any], tokens: list[str], *, bos: bool) -> None:
    """Let every prompt get a BOS, or an EOS, if the file says so; ``bos`` where it says nothing."""

    def added(name: str, default: bool) -> str:
        return tokens[get(f"{name}_token_id")] if get(f"add_{name}_token", default) else ""

    first, last = added("bos", bos), added("eos", False)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}".strip(),
        pair=f"{first} $A $B {last}".strip(),
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys([first, last]) if token],
    )


def _templates(metadata: Metadata) -> dict[str, str]:
    """Chat templates by name."""
    metadata.get("tokenizer.chat_templates")
    found = {"default": metadata.get("tokenizer.chat_template")}
    prefix = "tokenizer.chat_template."
    found |= {key.removeprefix(prefix): metadata.get(key) for key in metadata.keys(prefix)}
    return {name: template for name, template in found.items() if template}
