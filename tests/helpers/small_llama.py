"""Folders of a model of two layers with random weights, and of its tokenizer."""

from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tests.helpers.byte_tokenizer import EOS, byte_backend, save_backend

VOCAB = 300
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def save_llama(folder: Path, kind: Any = LlamaForCausalLM, **values: Any) -> None:
    """Save weights that are large enough for answers that vary.

    Args:
        folder: for them.
        kind: transformers' class.
        values: of its config.
    """
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "initializer_range": 0.3,
        "bos_token_id": None,
        "eos_token_id": EOS,
    }
    torch.manual_seed(0)
    kind(LlamaConfig(**sizes | values)).save_pretrained(folder)


def save_tokenizer(folder: Path) -> None:
    """Save a tokenizer of all bytes, the chat template's marks, and tokens that are never used."""
    backend = byte_backend(end="<|end|>")
    marks = ["<|user|>", "<|assistant|>"]
    backend.add_special_tokens([*marks, *(f"<|unused {i}|>" for i in range(VOCAB - 257 - len(marks)))])
    config = {"chat_template": TEMPLATE, "eos_token": "<|end|>", "tokenizer_class": "PreTrainedTokenizerFast"}
    save_backend(backend, folder, **config)
