"""Small random models, transformers' tokens for them, and fixtures that run the engine on them."""

import functools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rosebatch.engine.engine import Engine
from tests.helpers.families import FAMILIES, VARIANTS, reference_options
from tests.helpers.plain_hp1 import PlainHP1
from tests.helpers.reference import clear, generate
from tests.helpers.running import greedy
from tests.helpers.tiny_engines import engine_of, random_model

NEW_TOKENS = 12

_SIZES = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
_GPT2_SIZES = {"vocab_size": 199, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Name -> transformers' config class and its values; HP1 is the tests' own.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", _GPT2_SIZES),
    "gpt2-options": (
        "GPT2Config",
        {
            **_GPT2_SIZES,
            "n_inner": 100,
            "scale_attn_by_inverse_layer_idx": True,
            "activation_function": "relu",
            "tie_word_embeddings": False,
        },
    ),
    "llama": ("LlamaConfig", _SIZES),
    "llama3-rope-biases-tied": (
        "LlamaConfig",
        {
            **_SIZES,
            "rope_parameters": _LLAMA3,
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 32,
            "tie_word_embeddings": True,
        },
    ),
    "llama-linear-rope": (
        "LlamaConfig",
        {**_SIZES, "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}},
    ),
    "mistral": ("MistralConfig", {**_SIZES, "sliding_window": 7}),
    "qwen2": ("Qwen2Config", _SIZES),
    "qwen2-window": (
        "Qwen2Config",
        {**_SIZES, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", {**_SIZES, "head_dim": 24, "tie_word_embeddings": True}),
    "hp1": ("HP1", {**_SIZES, "head_dim": 24}),
    "hp1-options": (
        "HP1",
        {
            **_SIZES,
            "head_dim": 16,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "rope_theta": 500.0,
            "relu_pre": False,
            "clip_min": -0.2,
            "clip_max": 0.15,
        },
    ),
}


@dataclass(frozen=True)
class Golden:
    """A model's folder, prompts, and the greedy fp32 continuation of each by transformers or ``PlainHP1``."""

    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="session")
def goldens(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Golden]:
    """Name -> Golden; model and references are made on first use."""
    made: dict[str, Golden] = {}

    def golden(name: str) -> Golden:
        if name not in made:
            made[name] = _make(transformers, name, tmp_path_factory.mktemp(name))
        return made[name]

    return golden


def _make(transformers: Any, name: str, folder: Path) -> Golden:
    kind, values = {**MODELS, **FAMILIES, **VARIANTS}[name]
    if kind == "HP1":
        model = PlainHP1.random(values)
    else:
        tokens = dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"))
        model = random_model(getattr(transformers, kind)(**values, initializer_range=0.2, **tokens))
    model.save_pretrained(folder)
    prompts = _prompts(values["vocab_size"])
    tokens = _greedy(model, prompts, lambda length: reference_options(name))
    kept = sorted(tokens)[:64]
    assert len(kept) == 64, "too many prompts are decided by rounding"
    return Golden(folder, [prompts[i] for i in kept], [tokens[i] for i in kept])


def _greedy(model: Any, prompts: Sequence[Sequence[int]], *options: Any) -> dict[int, list[int]]:
    """A model's own greedy tokens, except for prompts whose tokens depend on rounding. Options: see ``generate``."""
    return clear(*generate(model, prompts, NEW_TOKENS, *options))


@pytest.fixture(scope="session")
def reference_model(transformers: Any, goldens: Callable[[str], Golden]) -> Callable[[str], Any]:
    """transformers' own model of a golden, loaded on first use."""

    @functools.cache
    def load(name: str) -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(goldens(name).folder, dtype=torch.float32).eval()

    return load


@pytest.fixture(scope="session")
def reference_tokens(reference_model: Callable[[str], Any]) -> Callable[..., dict[int, list[int]]]:
    """transformers' greedy tokens with further options; see ``_greedy``."""
    return lambda name, *args: _greedy(reference_model(name), *args)


def _prompts(vocab: int) -> list[list[int]]:
    """72 prompts of 1 to 100 tokens. Most share a beginning; some are equal or fill a whole number of blocks."""
    numbers = random.Random(0)
    shared = [numbers.randrange(vocab) for _ in range(100)]
    prompts = []
    for i in range(72):
        length = (1, 2, 9, 16, 32, 47, 65, 100)[i % 8]
        common = length if i % 5 == 0 else numbers.randint(0, length)
        prompts.append(shared[:common] + [numbers.randrange(vocab) for _ in range(length - common)])
    return prompts


@pytest.fixture(scope="session")
def make_engine() -> Callable[..., Engine]:
    """Makes an engine on a model's folder; switches by name. See ``engine_of``."""

    def make(
        folder: Path,
        dtype: str = "float32",
        *,
        seqs: int = 64,
        chunk: int = 8192,
        block_size: int = 16,
        blocks: int = 0,
        max_model_len: int | None = None,
        **switches: bool,
    ) -> Engine:
        limits = {"max_num_seqs": seqs, "max_num_batched_tokens": chunk, "block_size": block_size}
        return engine_of(folder, dtype, blocks=blocks, max_model_len=max_model_len, switches=switches, **limits)

    return make


@pytest.fixture(scope="session")
def greedy_tokens() -> Callable[..., list[list[int]]]:
    """The engine's greedy continuation of each prompt."""
    return lambda engine, prompts: greedy(engine, prompts, NEW_TOKENS)
