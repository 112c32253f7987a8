"""On a GPU: the engine's steps wait for nothing but their results, and every wait is counted."""

import random
import warnings
from typing import Any

import pytest
import torch

from rosebatch.config.run import RunConfig
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.cache.kv_cache import bytes_per_block
from rosebatch.launch.launch import launch
from tests.gpu.sync_mode import sync_mode

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

VOCAB, BLOCK = 199, 16
KINDS: list[dict[str, Any]] = [
    {"n": 4, "temperature": 0.9},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"logprobs": 3, "temperature": 1.0, "top_k": 20, "top_p": 0.9},
    {"logit_bias": ((17, 4.0), (40, -9.0)), "n": 4, "min_p": 0.05, "temperature": 1.1},
    {"prompt_logprobs": 2, "logprobs": 0, "min_tokens": 9},
    {},
]


def requests():
    """60 prompts. A half of them are whole blocks that another one has too: cached to their very end."""
    numbers = random.Random(0)
    shared = [numbers.randrange(VOCAB) for _ in range(4 * BLOCK)]
    made = []
    for index in range(60):
        length = BLOCK * numbers.randint(1, 4) if index % 2 else numbers.randint(1, 60)
        limits = {"max_tokens": 40 - index % 7, "seed": index, "ignore_eos": True}
        made.append(Request(index, tuple(shared[:length]), SamplingParams(**limits, **KINDS[index % len(KINDS)])))
    return made


@pytest.fixture
def small_engine(make_engine, model_config):
    """An engine whose cache is too small for its seats; kernels are compiled, graphs for most sizes captured."""

    def make(family, switches):
        memory = 40 * bytes_per_block(model_config(family).kv_planes, BLOCK, torch.float32)
        limits = {"seqs": 32, "block_size": BLOCK, "kv_cache_memory": memory}
        engine = make_engine(family, torch.float32, switches, **limits)
        assert len(list(engine.run(requests()))) == 120
        engine.restart_stats()
        return engine

    return make


def assert_all_was_met(engine):
    """Copies of blocks, cached prompts and preemptions: or the test would have shown little."""
    stats = engine.stats
    assert stats.copied_blocks > 0 and stats.preemptions > 0
    assert stats.syncs > 0


@pytest.mark.parametrize("off", [(), ("late_results",), ("batched_rollover",), ("cuda_graph",)])
@pytest.mark.parametrize("family", ["GPT2", "Qwen3"])
@pytest.mark.usefixtures("captures_may_wait")
def test_steps_wait_for_nothing(family, off, small_engine):
    """Every plan with copied blocks waited for a copy of their ids, and each prompt's log-probabilities for the step.

    An error is raised where the host would wait. Results come by events, which the host may wait for.
    """
    engine = small_engine(family, dict.fromkeys(off, False))
    with sync_mode("error"):
        assert len(list(engine.run(requests()))) == 120
    assert_all_was_met(engine)


@pytest.mark.parametrize(
    "off", [(), ("fused_sampler",), ("fused_sampler", "batched_sampling"), ("batched_rollover", "late_results")]
)
@pytest.mark.usefixtures("captures_may_wait")
def test_the_counter_agrees_with_pytorch(off, small_engine, monkeypatch):
    """The report's ``syncs`` were 20 where 480 values were fetched. PyTorch warns of each, except of events."""
    engine = small_engine("Qwen3", dict.fromkeys(off, False))
    synchronize, events = torch.cuda.Event.synchronize, []

    def counted(self):
        events.append(self)
        synchronize(self)

    monkeypatch.setattr(torch.cuda.Event, "synchronize", counted)
    with warnings.catch_warnings(record=True) as caught, sync_mode("warn"):
        warnings.simplefilter("always")
        assert len(list(engine.run(requests()))) == 120
    reads = [each for each in caught if "synchronizing CUDA operation" in str(each.message)]
    assert engine.stats.syncs == len(reads) + len(events)
    assert bool(reads) == ("fused_sampler" in off), "only PyTorch's sampling reads tensors"
    assert_all_was_met(engine)


@pytest.mark.usefixtures("captures_may_wait")
def test_flashinfer_waits_for_nothing(saved_model):
    """Each step waited to learn whether any row had a min-p, and for five copies of parameters."""
    pytest.importorskip("flashinfer")
    config = RunConfig.of(
        str(saved_model("Qwen3")), device="cuda", dtype="float32", sampler="flashinfer", kv_cache_memory=1 << 26
    )
    engine = launch(config).engine
    assert len(list(engine.run(requests()))) == 120
    with sync_mode("error"):
        assert len(list(engine.run(requests()))) == 120
