"""Works that generate nothing: scores of pairs, vectors of texts, log-probabilities of continuations.

Each has a model folder with random weights, which all engines read. The texts are words that are a token each.
"""

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain, islice, product
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import (
    BertConfig,
    BertModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    XLMRobertaConfig,
    XLMRobertaForSequenceClassification,
)

# Two lists: texts or token ids of each row, and what goes with them.
Rows = tuple[list[Any], list[Any]]
_SYLLABLES = ["".join(each) for each in product("bdfgklmnprst", "aeiou")]
_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}


@dataclass(frozen=True, slots=True)
class Work:
    """What is asked of an engine.

    Attributes:
        rows: how many it has.
        make: makes so many.
        write: writes its model's folder, a tiny one for tests, in a dtype.
    """

    rows: int
    make: Callable[[int, random.Random], Rows]
    write: Callable[[Path, bool, torch.dtype], None]


def _words(count: int) -> list[str]:
    """Words of two or three syllables, always the same."""
    return list(islice(map("".join, chain.from_iterable(product(_SYLLABLES, repeat=n) for n in (2, 3))), count))


_KNOWN = _words(20_000)


def _text(tokens: int, numbers: random.Random) -> str:
    return " ".join(numbers.choices(_KNOWN, k=tokens))


def _pairs(count: int, numbers: random.Random) -> Rows:
    """Queries and passages, about as long as those of MS MARCO."""
    queries = [_text(numbers.randint(5, 15), numbers) for _ in range(count)]
    return queries, [_text(numbers.randint(30, 180), numbers) for _ in range(count)]


def _texts(count: int, numbers: random.Random) -> Rows:
    """Log-normal around 60 tokens, from 8 to 256, the two special ones included."""
    lengths = [min(max(round(numbers.lognormvariate(4.1, 0.6)), 8), 256) - 2 for _ in range(count)]
    return [_text(length, numbers) for length in lengths], []


def _continuations(count: int, numbers: random.Random) -> Rows:
    """Contexts of 600 token ids, each with four continuations of 1 to 12."""
    ids = range(len(_KNOWN))
    # A row after the other: fewer rows are the first of many.
    rows = [
        (numbers.choices(ids, k=600), [numbers.choices(ids, k=numbers.randint(1, 12)) for _ in range(4)])
        for _ in range(count)
    ]
    return [context for context, _ in rows], [own for _, own in rows]


def _write_cross_encoder(folder: Path, tiny: bool, dtype: torch.dtype) -> None:
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    size = 250_002
    pieces = [*special, *("\u2581" + word for word in _words(size - len(special) - 1)), "<mask>"]
    tokenizer = Tokenizer(models.Unigram([(piece, -1.0 - n / size) for n, piece in enumerate(pieces)], unk_id=3))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", "<s> $A </s> </s> $B </s>", [("<s>", 0), ("</s>", 2)]
    )
    names = ("bos_token", "pad_token", "eos_token", "unk_token")
    config = XLMRobertaConfig(
        vocab_size=size,
        max_position_embeddings=514,
        type_vocab_size=1,
        layer_norm_eps=1e-5,
        num_labels=1,
        **_TINY if tiny else {},
    )
    _save(folder, XLMRobertaForSequenceClassification, config, dtype)
    _save_tokenizer(folder, tokenizer, dict(zip(names, special, strict=True)) | {"mask_token": "<mask>"})


def _write_encoder(folder: Path, tiny: bool, dtype: torch.dtype) -> None:
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    pieces = [*special, *_words(30_522 - len(special))]
    tokenizer = Tokenizer(models.WordPiece({piece: n for n, piece in enumerate(pieces)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536}
    config = BertConfig(vocab_size=len(pieces), **_TINY if tiny else shape)
    _save(folder, BertModel, config, dtype)
    _save_tokenizer(folder, tokenizer, dict(zip(names, special, strict=True)))
    _save_modules(folder, config.hidden_size)


def _save_modules(folder: Path, hidden_size: int) -> None:
    """Have readers of sentence-transformers' folders normalise the mean of all tokens."""
    kinds = {"": "Transformer", "1_Pooling": "Pooling", "2_Normalize": "Normalize"}
    modules = [
        {"idx": n, "name": str(n), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for n, (path, kind) in enumerate(kinds.items())
    ]
    pooling = {"word_embedding_dimension": hidden_size, "pooling_mode_mean_tokens": True}
    files = {
        "modules.json": modules,
        "1_Pooling/config.json": pooling,
        "sentence_bert_config.json": {"max_seq_length": 256, "do_lower_case": False},
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    (folder / "2_Normalize").mkdir()


def _write_decoder(folder: Path, tiny: bool, dtype: torch.dtype) -> None:
    shape = {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "intermediate_size": 3072,
    }
    config = Qwen3Config(
        vocab_size=len(_KNOWN) if tiny else 151_936,
        num_key_value_heads=2 if tiny else 8,
        head_dim=32 if tiny else 128,
        max_position_embeddings=40_960,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        **_TINY if tiny else shape,
    )
    _save(folder, Qwen3ForCausalLM, config, dtype)


def _save(folder: Path, kind: Any, config: Any, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    kind(config).to(dtype).save_pretrained(folder)


def _save_tokenizer(folder: Path, tokenizer: Tokenizer, special: dict[str, str]) -> None:
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_max_length=512, **special).save_pretrained(folder)


WORKS = {
    "pairs": Work(20_000, _pairs, _write_cross_encoder),
    "texts": Work(20_000, _texts, _write_encoder),
    "continuations": Work(5_000, _continuations, _write_decoder),
}
