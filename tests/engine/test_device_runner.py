"""The whole device path on Triton's interpreter, but for CUDA graphs: the same tokens as the plain runner's.

Each run mixes what the path treats differently: prompts in chunks with a prefix in common, one of them cached to its
very end, greedy and sampled rows, rows that end at an end token, a stop token or their limit, more sequences than
seats. Memory that nobody wrote is NaN, in the KV cache too: a token that depends on any of it would change.
"""

import os
from dataclasses import fields

import pytest
import torch

from rosebatch.config import ModelConfig, RopeConfig
from rosebatch.engine.block_pool import BlockPool
from rosebatch.engine.device_runner import DeviceRunner
from rosebatch.engine.engine import Engine
from rosebatch.engine.kv_cache import KVCache
from rosebatch.engine.runner import Runner
from rosebatch.engine.scheduler import Scheduler
from rosebatch.model.registry import build_model
from rosebatch.model.weights import RandomWeights
from rosebatch.ops import device_ops, select
from rosebatch.request import Request, SamplingParams
from rosebatch.toggles import Toggles

pytestmark = [
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="Triton compiles for the GPU in this process"),
    # The interpreter computes with numpy, which warns of the NaN in rows that nobody reads.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

CPU = torch.device("cpu")
VOCAB = 50
BLOCK_SIZE = 4
SEATS = 3
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "head_dim": 16,
    "intermediate_size": 24,
    "max_model_len": 40,
    "norm_eps": 1e-5,
}
MODELS = {
    "llama": ModelConfig(
        family="llama",
        num_kv_heads=1,
        activation="silu",
        rope=RopeConfig(),
        qk_norm=True,
        sliding_windows=(0, 7),
        eos_token_ids=(28,),
        **_SIZES,
    ),
    "gpt2": ModelConfig(
        family="gpt2",
        num_kv_heads=2,
        activation="gelu_new",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        eos_token_ids=(3,),
        **_SIZES,
    ),
}
# Tokens that the models do generate.
STOP_TOKENS = {"llama": 7, "gpt2": 15}


class Weights(RandomWeights):
    """Large enough that every part of the model moves the logits, norms and biases included."""

    def get(self, name, shape):
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
        weight = super().get(name, shape)
        return weight + 0.1 * noise if len(shape) == 1 else 14 * weight


@pytest.fixture(autouse=True)
def _few_programs(monkeypatch):
    """One split for each decoded sequence: what keys are divided into has its own tests, and programs take time."""
    from rosebatch_kernels.paged_attention import splits

    monkeypatch.setattr(splits, "_MANY_PROGRAMS", 1)


def requests(name):
    trunk = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(12)]
    rows = [
        ([*trunk[:10], 5, 9], {"max_tokens": 4, "ignore_eos": True}),
        (trunk[:8], {"max_tokens": 5, "temperature": 0.9, "top_k": 6, "top_p": 0.9, "seed": 2**63 + 5}),
        ([2], {"max_tokens": 9}),
        ([*trunk[:5], 44, 3], {"max_tokens": 9, "stop_token_ids": (STOP_TOKENS[name],), "ignore_eos": True}),
        (trunk[:8], {"max_tokens": 5, "ignore_eos": True}),
        ([*trunk[:9], 17], {"max_tokens": 1}),
        ([4, 8], {"max_tokens": 6, "temperature": 0.8, "seed": 2**40 + 3}),
    ]
    return [
        Request(index=i, prompt_token_ids=tuple(prompt), sampling=SamplingParams(**sampling))
        for i, (prompt, sampling) in enumerate(rows)
    ]


def run(name, engine):
    """Request index -> tokens and finish reason."""
    for request in requests(name):
        engine.add(request)
    done = {}
    while engine.has_unfinished:
        done |= {c.request.index: (c.token_ids, c.finish_reason) for c in engine.step()}
        engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    return done


def make_engine(name, runner_of, *, lookahead=0, blocks=60, **scheduling):
    config = MODELS[name]
    scheduler = Scheduler(BlockPool(blocks, BLOCK_SIZE), max_num_seqs=SEATS, max_num_batched_tokens=10, **scheduling)
    return Engine(
        scheduler,
        runner_of(config),
        vocab_size=VOCAB,
        max_model_len=config.max_model_len,
        eos_token_ids=config.eos_token_ids,
        lookahead=lookahead,
    )


def plain_engine(name):
    def runner_of(config):
        ops = select(Toggles.resolve({}, "cpu"))
        model = build_model(config, ops, Weights(torch.float32, CPU))
        return Runner(model, config, KVCache(config, 60, BLOCK_SIZE, torch.float32, CPU, ops), ops)

    return make_engine(name, runner_of)


def device_engine(name, off=(), blocks=60):
    """As a GPU would run it, graphs excepted, with the switches named in ``off`` off."""
    served = {f.name for f in fields(Toggles) if "cuda" in f.metadata["devices"]}
    assert served >= set(off)
    toggles = Toggles(**{f.name: f.name in served - {"cuda_graph", *off} for f in fields(Toggles)})
    window = 4 if toggles.fused_sampler and toggles.late_results else 1

    def runner_of(config):
        ops = select(toggles, "cuda")
        kernels = device_ops(SEATS, config.num_heads, config.num_kv_heads, config.head_dim, CPU)
        model = build_model(config, ops, Weights(torch.float32, CPU))
        cache = KVCache(config, blocks + 1, BLOCK_SIZE, torch.float32, CPU, ops)
        cache.data.fill_(float("nan"))
        limits = {"max_num_seqs": SEATS, "max_len": config.max_model_len, "window": window}
        return DeviceRunner(model, config, cache, ops, kernels, toggles, **limits)

    return make_engine(
        name,
        runner_of,
        lookahead=int(toggles.late_results),
        blocks=blocks,
        decode_window=window,
        prefix_cache=toggles.prefix_cache,
    )


@pytest.fixture(scope="module")
def expected():
    """What the plain runner generates, by model."""
    return {name: run(name, plain_engine(name)) for name in MODELS}


@pytest.fixture
def unwritten_is_nan():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", MODELS)
def test_the_requests_end_in_every_way(name, expected):
    """Or the runs below would compare little: by an end token, by a stop token, and past ends that are ignored."""
    (end,), done = MODELS[name].eos_token_ids, expected[name]
    assert {reason for _, reason in done.values()} == {"stop", "length"}
    assert done[2][0][-1] == end and done[2][1] == "stop"
    assert done[3][0][-1] == STOP_TOKENS[name] and done[3][1] == "stop"
    assert name != "gpt2" or end in done[4][0][:-1]
    assert len({tokens for tokens, _ in done.values()}) == len(done)


@pytest.mark.parametrize(
    ("name", "off"),
    [
        ("llama", ()),
        ("gpt2", ()),
        ("llama", ("fused_kv_append", "late_results")),
        ("llama", ("fused_rotary", "batched_rollover")),
        ("llama", ("fused_rotary", "fused_kv_append", "prefix_cache")),
        ("gpt2", ("fused_kv_append", "batched_kv_append", "fused_norm")),
        ("gpt2", ("fused_sampler", "fused_mlp")),
        ("llama", ("fused_sampler", "late_results", "batched_sampling")),
    ],
    ids=lambda value: value if isinstance(value, str) else "no " + ", ".join(value) if value else "all on",
)
@pytest.mark.usefixtures("unwritten_is_nan")
def test_tokens_equal_the_plain_runners(name, off, expected):
    """Switches that lie apart are off together: each pair of paths is taken once."""
    engine = device_engine(name, off)
    assert run(name, engine) == expected[name]
    assert (engine.stats.copied_blocks > 0) == ("prefix_cache" not in off)
    assert engine.stats.max_running == SEATS


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("unwritten_is_nan")
def test_tokens_after_a_preemption(name, expected):
    """A sequence comes back to another slot and other blocks, between windows that are under way."""
    engine = device_engine(name, blocks=5)
    assert run(name, engine) == expected[name]
    assert engine.stats.preemptions > 0
