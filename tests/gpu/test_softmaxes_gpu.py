"""On a GPU: caps, sinks, windows, rotation of some channels and every norm, inside graphs, as on a CPU."""

from dataclasses import fields

import pytest
import torch

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches, is_on
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.build import LoadedModel, build_engine
from rosebatch.ops.select import select
from tests.engine.small_models import MODELS, VOCAB, build, plain_engine

pytestmark = pytest.mark.gpu

_SAMPLING = SamplingParams(max_tokens=20, ignore_eos=True)
# Longer than the windows, which are smaller than a block.
_PROMPTS = [tuple((7 * i * i + 3 * i + length) % VOCAB for i in range(length)) for length in (1, 2, 5, 9, 13, 17, 19)]
# Bytes of K and V of a token, in fp32.
_TOKEN_BYTES = {"uneven": 2 * 4 * (16 + 64 + 48), "softmaxes": 2 * 4 * (12 + 40 + 48)}


def _requests():
    return [Request(index, prompt, _SAMPLING) for index, prompt in enumerate(_PROMPTS)]


@pytest.fixture(scope="module")
def expected():
    """Each model's tokens on a CPU."""
    return {name: {c.request.id: c.token_ids for c in plain_engine(name).run(_requests())} for name in _TOKEN_BYTES}


@pytest.mark.parametrize("off", [(), ("fused_qk_norm",), ("fused_kv_append",), ("fused_rotary",), ("split_keys",)])
@pytest.mark.parametrize(("slots", "blocks"), [(1, 40), (7, 40), (7, 4)])
@pytest.mark.parametrize("name", _TOKEN_BYTES)
def test_tokens_equal_a_cpus(name, slots, blocks, off, device, expected):
    """Few blocks make sequences come back from a preemption, in other seats."""
    switches = Switches(**{f.name: is_on(f, "cuda") and f.name not in off for f in fields(Switches)})
    ops = select(switches, "cuda")
    limits = RunConfig(
        device="cuda", max_num_seqs=slots, block_size=16, kv_cache_memory=blocks * 16 * _TOKEN_BYTES[name] + 1
    )
    model = build(name, ops, device)
    loaded = build_engine(LoadedModel(model, MODELS[name], ops, torch.float32, device), limits, switches)
    done = {c.request.id: c.token_ids for c in loaded.engine.run(_requests())}
    assert done == expected[name]
    assert (loaded.engine.stats.preemptions > 0) == (blocks == 4)
