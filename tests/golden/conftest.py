"""Small random models, transformers' tokens for them, and fixtures that run the engine on them."""

import functools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from rosebatch.engine.engine import Engine
from tests.helpers.families import FAMILIES, MODELS, VARIANTS, reference_options
from tests.helpers.plain_hp1 import PlainHP1
from tests.helpers.reference import clear, generate
from tests.helpers.running import greedy
from tests.helpers.shared_folder import make_once
from tests.helpers.tiny_engines import engine_of, random_model

# Enough to end a block of any size of these tests, and to begin the next.
NEW_TOKENS = 8
# Beside the weights: prompts, and the tokens of each.
_REFERENCES = "references.json"


@dataclass(frozen=True)
class Golden:
    """A model's folder, prompts, and the greedy fp32 continuation of each by transformers or ``PlainHP1``."""

    folder: Path
    prompts: list[list[int]]
    expected: list[list[int]]


@pytest.fixture(scope="session")
def goldens(transformers: Any, shared_folder: Path) -> Callable[[str], Golden]:
    """Name -> Golden; model and references are made on first use, by one of the forks for all."""

    @functools.cache
    def golden(name: str) -> Golden:
        folder = make_once(shared_folder / f"golden-{name}", functools.partial(_make, transformers, name))
        return Golden(folder, *json.loads((folder / _REFERENCES).read_text()))

    return golden


def _make(transformers: Any, name: str, folder: Path) -> None:
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
    references = [prompts[i] for i in kept], [tokens[i] for i in kept]
    (folder / _REFERENCES).write_text(json.dumps(references))


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
        model_impl: str = "auto",
        kv_cache_dtype: str = "auto",
        speculative_model: str | None = None,
        **switches: bool,
    ) -> Engine:
        limits = {"max_num_seqs": seqs, "max_num_batched_tokens": chunk, "block_size": block_size}
        model = {"max_model_len": max_model_len, "model_impl": model_impl, "kv_cache_dtype": kv_cache_dtype}
        model |= {"speculative_model": speculative_model}
        return engine_of(folder, dtype, blocks=blocks, switches=switches, **model, **limits)

    return make


@pytest.fixture(scope="session")
def greedy_tokens() -> Callable[..., list[list[int]]]:
    """The engine's greedy continuation of each prompt."""
    return lambda engine, prompts: greedy(engine, prompts, NEW_TOKENS)
