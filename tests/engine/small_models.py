"""Tiny models with random weights, and engines that run them: the plain way, and as a GPU would."""

from dataclasses import fields

import torch
from torch.nn import functional

from rosebatch.config.hp1 import HP1Config
from rosebatch.config.model import ModelConfig, RopeConfig
from rosebatch.config.switches import Switches, is_on
from rosebatch.engine.cache.kv_cache import KVCache
from rosebatch.engine.cache.state_pool import StatePool
from rosebatch.engine.cache.windows import window_groups
from rosebatch.engine.engine import Engine
from rosebatch.engine.long_rope import restart_policy
from rosebatch.engine.plan import AdapterKey
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.step_planner import SeparateDecodes
from rosebatch.engine.torch_runner.runner import TorchRunner
from rosebatch.engine.triton_runner.runner import TritonRunner
from rosebatch.model.adapters.by_row import Added, by_row
from rosebatch.model.contract import rows_of
from rosebatch.model.fallback.config import describe_config
from rosebatch.model.fallback.load import load_fallback
from rosebatch.model.mixers.paged_attention.mixer import PagedAttentionSpec
from rosebatch.model.quantization.dense import DenseWeight
from rosebatch.model.random_weights import RandomWeights
from rosebatch.model.registry import build_model
from rosebatch.model.rope import rope_tables
from rosebatch.ops.adapters import AdapterRows, StackedRows
from rosebatch.ops.device import device_ops
from rosebatch.ops.ops import HeadLayerNorm, HeadRMSNorm, WholeRMSNorm
from rosebatch.ops.select import select
from tests.engine.family_models import FAMILIES
from tests.helpers.tiny_families import tiny_config

CPU = torch.device("cpu")
VOCAB = 50
BLOCK_SIZE = 4
SLOTS = 3
SNAPSHOTS = 4
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 2,
    "head_dim": 16,
    "intermediate_size": 24,
    "max_model_len": 40,
}
MODELS = {
    "llama": ModelConfig(
        family="llama",
        num_kv_heads=1,
        norm_eps=1e-5,
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
        norm_eps=1e-5,
        activation="gelu_new",
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        tie_word_embeddings=True,
        eos_token_ids=(3,),
        **_SIZES,
    ),
    "hp1": ModelConfig(
        family="hp1",
        num_kv_heads=1,
        activation="relu",
        rope=RopeConfig(),
        hp1=HP1Config(),
        eos_token_ids=(40,),
        **_SIZES,
    ),
    # Lengths, vocabulary and end token only; see Uneven.
    "uneven": ModelConfig(
        family="gpt2", num_kv_heads=2, norm_eps=1e-5, activation="gelu_new", eos_token_ids=(46,), **_SIZES
    ),
    "softmaxes": ModelConfig(
        family="gpt2", num_kv_heads=2, norm_eps=1e-5, activation="gelu_new", eos_token_ids=(10,), **_SIZES
    ),
    "e4m3": ModelConfig(
        family="gpt2", num_kv_heads=2, norm_eps=1e-5, activation="gelu_new", eos_token_ids=(35,), **_SIZES
    ),
}


class Weights(RandomWeights):
    """Large enough that every part of the model moves the logits, norms and biases included.

    HP1's clips are made for the matrices' own deviation. Adapters change projections, the second one not all.
    """

    def __init__(self, name, adapters=0):
        super().__init__(torch.float32, CPU)
        self.factor = 1 if name == "hp1" else 14
        self.adapters = adapters

    def added(self, name, shape):
        return tuple(self._added(name, shape, slot) for slot in range(self.adapters))

    def _added(self, name, shape, slot):
        is_projection = "proj" in name or "attn" in name or "c_fc" in name
        if not is_projection or "expert" in name or (slot == 1 and ("k_proj" in name or "down" in name)):
            return None
        generator = torch.Generator().manual_seed(1000 * slot + sum(name.encode()))
        a, b = (torch.randn(size, generator=generator) for size in ((3 + slot, shape[1]), (shape[0], 3 + slot)))
        return Added(name, a * shape[1] ** -0.5, b * 0.3, (3 + slot,))

    def get(self, name, shape, *, dtype=None, fill=None, take=None):
        noise = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
        weight = super().get(name, shape, dtype=dtype, fill=fill)
        if fill is not None:
            return weight * (1 + 0.1 * noise)
        return weight + 0.1 * noise if len(shape) == 1 else self.factor * weight


# Before the name of a family that transformers' code computes.
FALLBACK = "fallback "


class Uneven:
    """Layers that differ in all that attention can differ in, more than those of any family.

    ``specs`` makes them, with functions that make weights and rotary tables.
    """

    def __init__(self, ops, specs, device=CPU):
        generator = torch.Generator().manual_seed(0)

        def weight(*shape):
            return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(device)

        def rotary(size, theta=10000.0):
            return rope_tables(RopeConfig(theta=theta), size, _SIZES["max_model_len"], torch.float32, device)

        self.ops = ops

        def linear(*shape):
            return ops.linear(DenseWeight.of(weight(*shape)), None)

        self.embedding, self.head = weight(VOCAB, 32), ops.head(DenseWeight.of(weight(VOCAB, 32)))
        self.mixers = specs(weight, rotary)
        self.qkv = [linear((s.num_heads + 2 * s.num_kv_heads) * s.head_dim, 32) for s in self.mixers]
        self.out = [linear(32, s.num_heads * s.head_dim) for s in self.mixers]

    def forward(self, input_ids, positions, attention, wanted=None):
        hidden = self.embedding[input_ids]
        for spec, qkv, out in zip(self.mixers, self.qkv, self.out, strict=True):
            hidden = hidden + out(attention(spec, qkv(2 * functional.rms_norm(hidden, (32,)))))
        return rows_of(functional.rms_norm(hidden, (32,)), wanted)

    def logits(self, hidden):
        return self.head(hidden)


def _uneven(weight, rotary):
    norm = HeadRMSNorm(weight(16), weight(16), 1e-5)
    return [
        PagedAttentionSpec(layer=0, num_heads=2, num_kv_heads=1, head_dim=16, scale=0.3, rotary=rotary(16), window=5),
        PagedAttentionSpec(layer=1, num_heads=4, num_kv_heads=2, head_dim=32, scale=0.2, rotary=rotary(32, 500.0)),
        PagedAttentionSpec(layer=2, num_heads=3, num_kv_heads=3, head_dim=16, scale=0.5, qk_norm=norm),
    ]


def _softmaxes(weight, rotary):
    """Caps, sinks, windows smaller than a block, rotation of some channels, each kind of norm, odd numbers of heads."""
    norm = WholeRMSNorm(1 + weight(80), 1 + weight(40), 1e-5)
    each = HeadLayerNorm(1 + weight(3, 16), 1 + weight(3, 16), 1e-5)
    more = {"sinks": weight(5) + 1, "rotary": rotary(4)}, {"soft_cap": 1.5, "rotary": rotary(20, 500.0)}
    last = {"soft_cap": 2.5, "sinks": weight(3), "rotary": rotary(6)}
    return [
        PagedAttentionSpec(layer=0, num_heads=5, num_kv_heads=1, head_dim=12, scale=0.3, window=7, **more[0]),
        PagedAttentionSpec(layer=1, num_heads=4, num_kv_heads=2, head_dim=20, scale=0.5, qk_norm=norm, **more[1]),
        PagedAttentionSpec(
            layer=2, num_heads=3, num_kv_heads=3, head_dim=16, scale=0.5, qk_norm=each, window=3, **last
        ),
    ]


def _e4m3(weight, rotary):
    """K and V as bytes with scales, beside a layer without; rows share keys, and chunks a tile."""
    norm, each = (
        HeadRMSNorm(1 + weight(16), 1 + weight(16), 1e-5),
        HeadLayerNorm(1 + weight(3, 16), 1 + weight(3, 16), 1e-5),
    )
    capped = {"soft_cap": 1.5, "sinks": weight(4) + 1, "rotary": rotary(20, 500.0)}
    return [
        PagedAttentionSpec(layer=0, num_heads=5, num_kv_heads=1, head_dim=16, scale=0.3, qk_norm=norm, e4m3=True),
        PagedAttentionSpec(layer=1, num_heads=4, num_kv_heads=2, head_dim=20, scale=0.5, e4m3=True, **capped),
        PagedAttentionSpec(layer=2, num_heads=4, num_kv_heads=2, head_dim=20, scale=0.2, rotary=rotary(20)),
        PagedAttentionSpec(layer=3, num_heads=3, num_kv_heads=3, head_dim=16, scale=0.5, qk_norm=each, e4m3=True),
    ]


_SPECS = {"uneven": _uneven, "softmaxes": _softmaxes, "e4m3": _e4m3}


def build(name, ops, device=CPU, adapters=0):
    """The model; families' own are made on the CPU only. Theirs alone may have adapters."""
    if name in _SPECS:
        return Uneven(ops, _SPECS[name], device)
    if name.startswith(FALLBACK):
        return load_fallback(_tiny(name), _shape(name), None, ops, torch.float32, device)
    return build_model(_shape(name), ops, Weights(name, adapters))


def _tiny(name):
    """transformers' config of a name such as ``fallback llama``."""
    config = tiny_config(name.removeprefix(FALLBACK))
    config.vocab_size = VOCAB
    return config


def _shape(name):
    if name.startswith(FALLBACK):
        return describe_config(_tiny(name), name, None, None)
    return MODELS[name] if name in MODELS else FAMILIES[name]


def make_cache(model, blocks, ops):
    """So many blocks in each group of layers with the same window."""
    windows, group_of = _groups(model)
    layers = [spec.planes for spec in _cached(model)]
    return KVCache(layers, [blocks] * len(windows), BLOCK_SIZE, torch.float32, CPU, ops, group_of)


def _cached(model):
    return [spec for spec in model.mixers if spec.planes and not spec.shares]


def _groups(model):
    return window_groups([spec.window for spec in _cached(model)], _SIZES["max_model_len"])


def make_states(model, ops):
    """NaN, as the slots' last sequences may have left them."""
    layers = [spec.states for spec in model.mixers if spec.states]
    if not layers:
        return None
    states = StatePool(layers, SLOTS, SNAPSHOTS, torch.float32, CPU, ops)
    for index in range(len(layers)):
        for part in states.layer(index):
            part.fill_(float("nan"))
    return states


def make_engine(name, runner_of, *, async_depth=0, blocks=60, budget=10, adapters=0, **scheduling):
    config = _shape(name)
    if config.num_state_layers:
        scheduling.setdefault("snapshots", SNAPSHOTS)
    runner = runner_of(config)
    pools = [BlockPool(blocks, BLOCK_SIZE, window) for window in _groups(runner.model)[0]]
    scheduling |= {"restarts": runner.restarts, "chunk_unit": max(spec.chunk_unit for spec in runner.model.mixers)}
    return Engine(
        Scheduler(*pools, max_num_seqs=SLOTS, max_num_batched_tokens=budget, **scheduling),
        runner,
        vocab_size=VOCAB,
        max_model_len=config.max_model_len,
        eos_token_ids=config.eos_token_ids,
        async_depth=async_depth,
        adapters={str(number): AdapterKey(number, bytes([number])) for number in range(1, adapters + 1)},
    )


def plain_engine(name, blocks=60, host_blocks=0, adapters=0, **scheduling):
    def runner_of(config):
        ops, rows = select(Switches.resolve({}, "cpu")), AdapterRows() if adapters else None
        model = build(name, ops if rows is None else by_row(ops, rows), adapters=adapters)
        cache, restarts = make_cache(model, blocks, ops), restart_policy(model.mixers)
        return TorchRunner(model, cache, ops, make_states(model, ops), restarts=restarts, adapters=rows)

    return make_engine(name, runner_of, blocks=blocks, host_blocks=host_blocks, adapters=adapters, **scheduling)


def device_engine(name, off=(), blocks=60, host_blocks=0, on=(), budget=10, adapters=0, adapter_slots=0, **scheduling):
    """As a GPU would run it, graphs excepted, with the switches named in ``off`` off and those in ``on`` on."""
    served = {f.name for f in fields(Switches) if "cuda" in f.metadata["devices"]}
    assert served >= {*off, *on}
    wanted = {f.name for f in fields(Switches) if is_on(f, "cuda")} - {"cuda_graph", *off} | {*on}
    switches = Switches(**{f.name: f.name in wanted for f in fields(Switches)})
    window = 4 if switches.fused_sampler and switches.late_results else 1

    def runner_of(config):
        ops, rows = select(switches, "cuda"), StackedRows(adapter_slots or adapters, switches) if adapters else None
        model = build(name, ops if rows is None else by_row(ops, rows), adapters=adapters)
        kernels = device_ops(switches)
        cache = make_cache(model, blocks + 1, ops)
        for data in cache.tensors:
            # NaN of e4m3.
            data.fill_(float("nan") if data.is_floating_point() else 127)
        return TritonRunner(
            model,
            cache,
            ops,
            kernels,
            switches,
            vocab_size=VOCAB,
            eos_token_ids=config.eos_token_ids,
            max_num_seqs=SLOTS,
            max_len=config.max_model_len,
            window=window,
            states=make_states(model, ops),
            restarts=restart_policy(model.mixers),
            adapters=rows,
        )

    return make_engine(
        name,
        runner_of,
        adapters=adapters,
        adapter_slots=adapter_slots,
        async_depth=int(switches.late_results),
        blocks=blocks,
        policy=SeparateDecodes(window),
        host_blocks=host_blocks,
        exact_prefixes=switches.batch_invariant,
        replays=switches.replays,
        budget=budget,
        **{"prefix_cache": switches.prefix_cache, **scheduling},
    )
