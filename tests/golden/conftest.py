"""Small random models, transformers' tokens for them, and fixtures that run the engine on them."""

import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.request import Completion, Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.cache.kv_cache import bytes_per_block
from rosebatch.engine.engine import Engine
from rosebatch.engine.load import load_engine
from rosebatch.model.source import find_model
from tests.golden.families import FAMILIES, VARIANTS, reference_options
from tests.golden.plain_hp1 import PlainHP1

CPU = torch.device("cpu")
NEW_TOKENS = 12
# A greedy token with a smaller margin may differ by rounding alone: such prompts are left out.
MARGIN = 1e-3

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
def transformers() -> Iterator[Any]:
    """The library without its messages: progress bars and advice would spoil the tests' output."""
    import transformers

    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    yield transformers
    transformers.logging.set_verbosity(verbosity)
    transformers.logging.enable_progress_bar()


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
    model = PlainHP1.random(values) if kind == "HP1" else _random_model(transformers, kind, values)
    model.save_pretrained(folder)
    prompts = _prompts(values["vocab_size"])
    tokens = _greedy(model, prompts, lambda length: reference_options(name))
    kept = sorted(tokens)[:64]
    assert len(kept) == 64, "too many prompts are decided by rounding"
    return Golden(folder, [prompts[i] for i in kept], [tokens[i] for i in kept])


def _random_model(transformers: Any, kind: str, values: dict[str, Any]) -> Any:
    config = getattr(transformers, kind)(
        **values, initializer_range=0.2, eos_token_id=None, bos_token_id=None, pad_token_id=None
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for parameter_name, parameter in model.named_parameters():
        if parameter.ndim == 1:
            # At one and zero a model could ignore norms and biases without failing a test.
            norm_scale = parameter_name.endswith("weight")
            torch.nn.init.normal_(parameter, 1.0 if norm_scale else 0.0, 0.2)
    return model


def _greedy(
    model: Any, prompts: Sequence[Sequence[int]], options: Callable[[int], dict[str, Any]] = lambda length: {}
) -> dict[int, list[int]]:
    """A model's own greedy tokens, except for prompts whose tokens depend on rounding.

    Args:
        model: of transformers, or ``PlainHP1``.
        prompts: of any lengths.
        options: length of a prompt -> further options of ``generate``.
    """
    tokens: dict[int, list[int]] = {}
    for length in sorted({len(p) for p in prompts}):
        rows = [i for i, p in enumerate(prompts) if len(p) == length]
        chosen, margins = _reference(model, torch.tensor([prompts[i] for i in rows]), options(length))
        tokens |= {i: c for i, c, m in zip(rows, chosen, margins, strict=True) if m > MARGIN}
    return tokens


def _reference(model: Any, prompts: Tensor, options: dict[str, Any]) -> tuple[list[list[int]], list[float]]:
    """Greedy tokens of prompts of one length, and for each the smallest margin of any choice."""
    with torch.inference_mode():
        out = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            pad_token_id=0,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
    best = torch.stack(out.scores).topk(2, -1).values
    margins = (best[..., 0] - best[..., 1]).amin(0)
    return out.sequences[:, prompts.shape[1] :].tolist(), margins.tolist()


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
    """Makes an engine on a model's folder, with ``blocks`` of KV cache; 0 gives plenty."""

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
        source = find_model(str(folder), "auto", dtype, CPU, max_model_len=max_model_len)
        memory = blocks * bytes_per_block(source.config.kv_planes, block_size, source.dtype) or 64 << 20
        limits = RunConfig(
            max_num_seqs=seqs, max_num_batched_tokens=chunk, block_size=block_size, kv_cache_memory=memory
        )
        return load_engine(source, limits, Switches.resolve(switches, "cpu"), CPU).engine

    return make


@pytest.fixture(scope="session")
def run_choices() -> Callable[..., dict[tuple[int, int], Completion]]:
    """Runs requests and checks integrity after every step. Request id and sample -> completion."""

    def run(engine: Engine, requests: Sequence[Request]) -> dict[tuple[int, int], Completion]:
        for request in requests:
            engine.add(request)
        done = {}
        while engine.has_unfinished:
            done |= {(completion.request.id, completion.sample): completion for completion in engine.step()}
            engine.scheduler.check_integrity()
        assert engine.scheduler.blocks.num_used == 0
        return done

    return run


@pytest.fixture(scope="session")
def run_engine(
    run_choices: Callable[..., dict[tuple[int, int], Completion]],
) -> Callable[..., dict[int, Completion]]:
    """The same for requests of one completion each. Request id -> completion."""
    return lambda engine, requests: {id: done for (id, _), done in run_choices(engine, requests).items()}


@pytest.fixture(scope="session")
def greedy_tokens(run_engine: Callable[..., dict[int, Completion]]) -> Callable[..., list[list[int]]]:
    """The engine's greedy continuation of each prompt."""

    def tokens(engine: Engine, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        requests = [Request(i, tuple(p), sampling) for i, p in enumerate(prompts)]
        done = run_engine(engine, requests)
        return [list(done[i].token_ids) for i in range(len(prompts))]

    return tokens
