"""Encoders through the Triton runner on its interpreter: the vectors of the PyTorch runner."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from rosebatch.config.switches import Switches, is_on
from rosebatch.core.pooling_params import ModelPooling, PoolingParams
from rosebatch.core.request import Request
from rosebatch.engine.cache.kv_cache import KVCache
from rosebatch.engine.engine import Engine
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.step_planner import SeparateDecodes
from rosebatch.engine.torch_runner.runner import TorchRunner
from rosebatch.engine.triton_runner.runner import TritonRunner
from rosebatch.model.hf.config import parse_model_config
from rosebatch.model.random_weights import RandomWeights
from rosebatch.model.registry import build_model
from rosebatch.ops.device import device_ops
from rosebatch.ops.select import select
from tests.helpers import running
from tests.helpers.families import ENCODERS
from tests.helpers.marks import ON_TRITON_RUNNER

pytestmark = ON_TRITON_RUNNER
CPU = torch.device("cpu")
SLOTS, VOCAB = 3, 50
_SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 16}
_DISTILLED = {"vocab_size": VOCAB, "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 24}
# More of them than slots, some longer than a step, one of a tile and a rest.
LENGTHS = (14, 9, 1, 70, 9, 3)
PROMPTS = [tuple((7 * i * i + 3 * i + length) % (VOCAB - 6) + 6 for i in range(length)) for length in LENGTHS]


def shape_of(name):
    kind, values = ENCODERS[name]
    values = {**values, **(_DISTILLED if name == "distilbert" else _SIZES), "local_attention": 5, "sliding_window": 5}
    values |= {"layer_types": values["layer_types"][:2]} if "layer_types" in values else {}
    return parse_model_config({**values, "architectures": [kind.replace("Config", "Model")]}, name)


def engine_of(config, runner, **scheduling):
    limits = {"max_num_seqs": SLOTS, "max_num_batched_tokens": 20, "prefix_cache": False, "chunked_prefill": False}
    scheduler = Scheduler(**limits, **scheduling)
    pooling = ModelPooling(bidirectional=True)
    return Engine(
        runner=runner, scheduler=scheduler, vocab_size=VOCAB, max_model_len=130, generates=False, pooling=pooling
    )


def plain_engine(config):
    ops = select(Switches.resolve({}, "cpu"))
    model = build_model(config, ops, RandomWeights(torch.float32, CPU))
    return engine_of(config, TorchRunner(model, KVCache([], [], 4, torch.float32, CPU, ops, ()), ops))


def device_engine(config):
    switches = Switches(**{f.name: f.name != "cuda_graph" and is_on(f, "cuda") for f in fields(Switches)})
    ops = select(switches, "cuda")
    model = build_model(config, ops, RandomWeights(torch.float32, CPU))
    cache = KVCache([], [], 4, torch.float32, CPU, ops, ())
    limits = {"vocab_size": VOCAB, "eos_token_ids": (), "max_num_seqs": SLOTS, "max_len": 130, "window": 4}
    runner = TritonRunner(model, cache, ops, device_ops(switches), switches, **limits)
    return engine_of(config, runner, policy=SeparateDecodes(4))


def embed(engine, pooling):
    params = PoolingParams(pooling=pooling)
    done = running.run(engine, [Request(i, prompt, pooling=params) for i, prompt in enumerate(PROMPTS)])
    return np.array([done[i].pooled for i in range(len(PROMPTS))])


@pytest.mark.whole
@pytest.mark.parametrize("name", ["bert", "mpnet", "modernbert-biases", "gte", "embeddinggemma"])
def test_kernels_give_the_plain_vectors(name):
    """A row of padding, of another prompt, or the last in place of the first would be another vector."""
    config = shape_of(name)
    plain, device = plain_engine(config), device_engine(config)
    for pooling in ("mean", "cls", "last"):
        np.testing.assert_allclose(embed(device, pooling), embed(plain, pooling), rtol=0, atol=2e-5)


def test_steps_with_padding_give_the_same_means():
    """Rows of padding after the last prompt are no part of its mean; a state of an earlier step might be."""
    config = shape_of("bert")
    exact, padded = device_engine(config), device_engine(config)
    # The bodies of what would be graphs.
    padded.runner.packed.enabled, padded.runner.packed.replaying = True, False
    kinds, run = [], padded.runner.packed.run
    padded.runner.packed.run = lambda kind: kinds.append(kind) or run(kind)
    for pooling in ("mean", "max", "last"):
        np.testing.assert_allclose(embed(padded, pooling), embed(exact, pooling), rtol=0, atol=2e-5)
    assert {kind.whole for kind in kinds} == {True, False}
    assert all(kind.size % 16 == 0 for kind in kinds)
