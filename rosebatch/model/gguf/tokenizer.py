"""From the tokenizer of a .gguf file to tokenizer.json and tokenizer_config.json, in transformers' format."""

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from rosebatch.host.model_files import refusal, shown
from rosebatch.model.family import integers, list_of
from rosebatch.model.gguf.metadata import Metadata, TokenType
from rosebatch.model.gguf.sentencepiece import sentencepiece, spelled

_SPLIT_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPLIT_HEAD = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|"
# Qwen3.5: marks are parts of words.
_QWEN_35 = _ENDINGS + r"|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# GPT-4o: words end where capitals begin, and keep their endings.
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_GPT_4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_ENDINGS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_ENDINGS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


# DeepSeek's: numbers first, then Chinese and Japanese, then words and signs.
_DEEPSEEK_3 = (
    r"\p{N}{1,3}",
    "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"""
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)
# Of the alphabets that have capitals, and of East Asia.
_DEEPSEEK = (
    r"[\r\n]",
    r"\s?[\p{Lu}\p{Ll}\p{Lt}]+",
    "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
    r"\s+$",
    "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
    r"\p{N}",
)
# Kimi's: as GPT-4o's, but for Chinese.
_KIMI = r"\p{Han}+|" + _GPT_4O.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]").replace("[\\r\\n/]", "[\\r\\n]")


def _gpt2() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _threes() -> Any:
    return _split(_SPLIT_HEAD + r"\p{N}{1,3}|" + _SPLIT_TAIL)


def _ones() -> Any:
    return _split(_SPLIT_HEAD + r"\p{N}|" + _SPLIT_TAIL)


def _split(*patterns: str) -> Any:
    splits = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


# Nemotron's has Pixtral's name.
_LLAMA_3 = ("llama-bpe", "llama3", "llama-v3", "lfm2", "pixtral", "falcon-h1")
_GLM = ("glm4", "chatglm-bpe")
# Values of tokenizer.ggml.pre, from llama.cpp: how text is split before byte-pair merges.
_PRE_TOKENIZERS: dict[str, Callable[[], Any]] = {
    "default": _gpt2,
    "gpt-2": _gpt2,
    "olmo": _gpt2,
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _digits),
    **dict.fromkeys((*_LLAMA_3, *_GLM, "dbrx"), _threes),
    **dict.fromkeys(("qwen2", "stablelm2"), _ones),
    "qwen35": lambda: _split(_QWEN_35),
    "gpt-4o": lambda: _split(_GPT_4O),
    "kimi-k2": lambda: _split(_KIMI),
    "deepseek-llm": lambda: _split(*_DEEPSEEK),
    "deepseek-v3": lambda: _split(*_DEEPSEEK_3),
}
# What their models' own tokenizers put before a prompt; the files do not say so.
_GLM_PROMPT = ["[gMASK]", "<sop>"]
# They take whole words of the vocabulary before they try merges.
_WHOLE_WORDS = (*_LLAMA_3, *_GLM, "gpt-4o", "kimi-k2")
# Their models' own tokenizers compose characters first (NFC); llama.cpp does not.
_COMPOSED = ("olmo", "command-r", "qwen2", "qwen35", "stablelm2")

# Texts of tokens that end an answer, whatever the file's keys say: llama.cpp's list.
_END_TEXTS = {
    *("</s>", "<eos>", "[EOS]", "<|endoftext|>", "<|end_of_text|>", "<|end|>", "<|im_end|>", "<|return|>"),
    *("<|eot_id|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "<end_of_turn>", "<turn|>", "<end_of_utterance>"),
    *("<|call|>", "<|calls|>", "<|flush|>", "<|tool_response>", "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>"),
    *("[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>"),
}
# Of some kinds of tokenizers alone: elsewhere they may be words. The models' own generation_config.json has them.
_GLM_ENDS = {"<|user|>", "<|observation|>"}
_PHI_3_ENDS = {"<|assistant|>"}
# These end no answer beside such others: gpt-oss's thoughts end with the first, and Gemma has tags of HTML.
_NO_ENDS = {"<|end|>": {"<|return|>", "<|call|>"}, "</s>": {"<eos>"}}
_END_KEYS = ("eos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
# Of Phi-3's special tokens, those that do not take the space behind them.
_NO_STRIP = ("<unk>", "<s>", "<|endoftext|>")
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
        """Write both files.

        Raises:
            OSError: they cannot be written.
        """
        # Its own method to write raises a plain Exception.
        (folder / "tokenizer.json").write_text(self.backend.to_str(pretty=True), encoding="utf-8")
        (folder / "tokenizer_config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")


def read_tokenizer(metadata: Metadata, path: Path, pieces: str) -> GGUFTokenizer:
    """Make the tokenizer of a file.

    Args:
        metadata: of the file.
        path: the file, for errors.
        pieces: whose rules a sentencepiece vocabulary has, see ``GGUF``.

    Raises:
        UserError: the tokenizer is not supported or lacks metadata.
    """

    def get(name: str, default: Any = None, kind: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{name}", default, kind)

    kind, pre = get("model", kind=str), get("pre", "default")
    if kind != "llama" and (kind != "gpt2" or pre not in _PRE_TOKENIZERS):
        known = ", ".join(_PRE_TOKENIZERS)
        raise refusal(
            path, f"tokenizer {shown(kind)} with pre-tokenizer {shown(pre)} is not supported; supported are {known}"
        )
    tokens: list[str] = metadata.need("tokenizer.ggml.tokens", list[str])
    types: list[int] = get("token_type", [1] * len(tokens), list_of(int, len(tokens)))
    token_id = integers(below=len(tokens))
    named = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: get(f"{key}_token_id", kind=token_id) for name, key in named.items()}
    if kind == "llama":
        tokens = spelled(tokens, pieces)
        backend = sentencepiece(metadata, tokens, pieces)
    else:
        backend = _byte_level(path, tokens, metadata, pre)
    for name in _HARMLESS:
        get(name)
    metadata.require("tokenizer.ggml.add_sep_token", False)
    metadata.require("tokenizer.ggml.token_type_count", 0, 1)
    own_ends = _GLM_ENDS if pre in _GLM else _PHI_3_ENDS if (kind, pieces) == ("llama", "phi") else set()
    # The last key is Ollama's.
    keyed = [
        *(get(f"{name}_token_id", kind=token_id) for name in _END_KEYS),
        *get("eos_token_ids", [], list_of(token_id)),
    ]
    end_ids = _end_ids(tokens, keyed, _END_TEXTS | own_ends)
    templates = _templates(metadata)
    marks = set(_MARK.findall("".join(templates.values())))
    controls = {tokens[i] for i in end_ids}
    for token, token_type in zip(tokens, types, strict=True):
        # Some files call marks words, or unused.
        is_control = token_type == TokenType.CONTROL or token in controls
        if is_control or (token in marks and token_type != TokenType.USER_DEFINED):
            rstrip = pieces == "phi" and kind == "llama" and token not in _NO_STRIP
            backend.add_special_tokens([AddedToken(token, special=True, normalized=False, rstrip=rstrip)])
        elif token_type == TokenType.USER_DEFINED:
            backend.add_tokens([AddedToken(token, special=False, normalized=False)])
    _add_to_prompts(backend, metadata, tokens, bos=kind == "llama" or pre in _LLAMA_3)
    config: dict[str, Any] = {name: tokens[i] for name, i in ids.items() if i is not None}
    config |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    if templates:
        config["chat_template"] = [{"name": name, "template": each} for name, each in templates.items()]
    return GGUFTokenizer(backend, config, end_ids)


def _byte_level(path: Path, tokens: list[str], metadata: Metadata, pre: str) -> Tokenizer:
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.need("tokenizer.ggml.merges", list[str])]
    if bad := next((merge for merge in merges if len(merge) != 2), None):
        raise refusal(path, f"the merge {shown(bad[0])} is no pair of tokens")
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre in _WHOLE_WORDS))
    if pre in _COMPOSED:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _end_ids(tokens: list[str], keyed: list[int | None], texts_of_ends: set[str]) -> list[int]:
    """Tokens that end an answer: those of the file's keys first, then those with such texts."""
    by_text = [i for i, token in enumerate(tokens) if token in texts_of_ends]
    found = list(dict.fromkeys([*(i for i in keyed if i is not None), *by_text]))
    texts = {tokens[i] for i in found}
    return [i for i in found if not _NO_ENDS.get(tokens[i], {""}) <= texts]


def _add_to_prompts(backend: Tokenizer, metadata: Metadata, tokens: list[str], *, bos: bool) -> None:
    """Let every prompt get a BOS, or an EOS, if the file says so; ``bos`` where it says nothing."""

    def added(name: str, default: bool) -> str:
        is_added = metadata.get(f"tokenizer.ggml.add_{name}_token", default)
        return tokens[metadata.need(f"tokenizer.ggml.{name}_token_id", int)] if is_added else ""

    first, last = [added("bos", bos)], [added("eos", False)]
    if metadata.get("tokenizer.ggml.pre") in _GLM and set(_GLM_PROMPT) <= set(tokens):
        first = _GLM_PROMPT
    first, last = [each for each in first if each], [each for each in last if each]
    backend.post_processor = processors.TemplateProcessing(
        single=[*first, "$A", *last],
        pair=[*first, "$A", "$B", *last],
        special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys([*first, *last])],
    )


def _templates(metadata: Metadata) -> dict[str, str]:
    """Chat templates by name."""
    metadata.get("tokenizer.chat_templates")
    found = {"default": metadata.get("tokenizer.chat_template", kind=str)}
    prefix = "tokenizer.chat_template."
    found |= {key.removeprefix(prefix): metadata.get(key, kind=str) for key in metadata.keys(prefix)}
    return {name: template for name, template in found.items() if template}
