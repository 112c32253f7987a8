"""States are copied between slots on a GPU, beside graphs that write them: rows have the tokens of each alone."""

import random

import pytest
import torch

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from tests.gpu.sync_mode import sync_mode
from tests.helpers.reference import clear
from tests.helpers.running import run_choices

pytestmark = pytest.mark.gpu

NEW_TOKENS = 16
# A token with a smaller margin may differ by rounding alone: such prompts are left out.
MARGIN = 2e-3
FAMILIES = ["qwen3_5", "qwen3_next", "olmo_hybrid", "kimi_linear", "lfm2", "lfm2_moe", "nemotron_h", "falcon_h1"]


@pytest.fixture(scope="module", params=FAMILIES)
def golden(request, model_config, reference):
    """A family, prompts of which most begin alike, and transformers' tokens for each of them."""
    vocab, numbers = model_config(request.param).vocab_size, random.Random(0)
    shared = [numbers.randrange(vocab) for _ in range(150)]
    prompts = []
    for common in (150, 131, 131, 64, 0) * 20:
        own = [numbers.randrange(vocab) for _ in range(numbers.randint(1, 40))]
        prompts.append(shared[:common] + own)
    tokens, logits = reference(request.param, torch.float32, prompts, NEW_TOKENS)
    kept = clear(tokens, logits, MARGIN)
    assert len(kept) >= 70, "too many prompts are decided by rounding"
    return request.param, [prompts[i] for i in kept], list(kept.values())


def requests_of(prompts, n):
    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, n=n)
    return [Request(number, tuple(prompt), sampling) for number, prompt in enumerate(prompts)]


@pytest.mark.parametrize("blocks", [0, 26])
@pytest.mark.parametrize("seqs", [1, 7, 64])
def test_copies_of_states(golden, seqs, blocks, make_engine):
    """Whole prompts and short chunks, preempted too. A copy that is late by a step would give others' tokens."""
    family, prompts, expected = golden
    count, alone = min(2 * seqs, len(prompts)), 0
    for limits, switches in (({}, {}), ({"max_num_batched_tokens": 100}, {}), ({}, {"cuda_graph": False})):
        engine = make_engine(family, torch.float32, switches, seqs=seqs, blocks=blocks, block_size=16, **limits)
        for n in (1, 4):
            done = run_choices(engine, requests_of(prompts[:count], n))
            assert {key: list(each.token_ids) for key, each in done.items()} == {
                (number, sample): expected[number] for number in range(count) for sample in range(n)
            }
            alone += n * sum(len(prompt) + NEW_TOKENS - 1 for prompt in prompts[:count])
        assert engine.stats.graph_replays > 0 or not switches.get("cuda_graph", True)
        assert engine.stats.computed_tokens < alone * 0.6 or engine.stats.preemptions
        alone = 0


@pytest.mark.usefixtures("captures_may_wait")
def test_copies_wait_for_nothing(golden, make_engine):
    """The ids of slots go to the device as those of blocks do. A step that waited for them would keep it idle."""
    family, prompts, _ = golden
    engine = make_engine(family, torch.float32, {}, seqs=16)
    with sync_mode("error"):
        assert len(list(engine.run(requests_of(prompts[:40], 3)))) == 120


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_shared_states_have_the_same_bits(family, dtype, model_config, make_engine):
    """With --batch-invariant: chunks end for snapshots where those of a whole prompt may, and so do those of forks."""
    vocab, numbers = model_config(family).vocab_size, random.Random(1)
    shared = [numbers.randrange(vocab) for _ in range(150)]
    lengths = (150, 129, 129, 70, 0) * 6
    prompts = [shared[:common] + [numbers.randrange(vocab) for _ in range(1 + common % 70)] for common in lengths]
    requests = [
        Request(number, tuple(prompt), SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, n=3, logprobs=3))
        for number, prompt in enumerate(prompts)
    ]
    found = []
    for switches in ({}, {"prefix_cache": False}):
        engine = make_engine(family, dtype, {"batch_invariant": True, **switches}, seqs=48)
        done = run_choices(engine, requests)
        found.append({key: (each.token_ids, [list(one) for one in each.logprobs]) for key, each in done.items()})
        if switches:
            # Forks share a prompt without the prefix cache: here each computes it.
            engine.scheduler.planner.share_prompts = False
            done = run_choices(engine, requests)
            found.append({key: (each.token_ids, [list(one) for one in each.logprobs]) for key, each in done.items()})
    assert found[0] == found[1] == found[2]
