"""On a GPU, longrope: sequences start over at the trained length, in graphs and between windows under way."""

import random

import pytest
import torch

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from tests.helpers.reference import clear
from tests.helpers.running import greedy

pytestmark = pytest.mark.gpu

NAME = "phi3-longrope"
TRAINED = 40
NEW_TOKENS = 24
# A token with a smaller margin may differ by rounding alone: such prompts are left out.
MARGIN = 2e-3


@pytest.fixture(scope="module")
def golden(reference):
    """Prompts whose answers pass the trained length after each number of tokens, and transformers' answers."""
    numbers = random.Random(2)
    trunk = [numbers.randrange(211) for _ in range(TRAINED + 4)]
    prompts = []
    for length in [*range(TRAINED - NEW_TOKENS - 1, TRAINED + 4)] * 4:
        common = numbers.randint(0, length)
        prompts.append(trunk[:common] + [numbers.randrange(211) for _ in range(length - common)])
    tokens, logits = reference(NAME, torch.float32, prompts, NEW_TOKENS)
    kept = clear(tokens, logits, MARGIN)
    assert len({len(prompts[i]) for i in kept}) == NEW_TOKENS + 5, "each length has a prompt"
    return [prompts[i] for i in kept], list(kept.values())


@pytest.mark.parametrize(("batch", "chunk", "blocks"), [(1, 8192, 0), (7, 20, 0), (64, 8192, 0), (64, 50, 14)])
@pytest.mark.parametrize("off", [None, "cuda_graph", "prefix_cache", "late_results", "fused_rotary"])
def test_answers_cross_the_trained_length(off, batch, chunk, blocks, golden, make_engine):
    """A window that goes on with short factors, or a row that comes back too early, changes tokens."""
    prompts, expected = golden
    prompts, expected = (prompts[::7], expected[::7]) if batch == 1 else golden
    limits = {"max_num_batched_tokens": chunk, "blocks": blocks}
    engine = make_engine(NAME, torch.float32, {off: False} if off else None, seqs=batch, **limits)
    assert greedy(engine, prompts, NEW_TOKENS) == expected
    assert engine.stats.preemptions > 0 or not blocks


def test_completions_of_one_prompt(golden, make_engine):
    """They share blocks with short factors and start over one by one: as many prompts give the same tokens."""
    engine = make_engine(NAME, torch.float32, seqs=64, block_size=16)
    for length in (TRAINED - 8, TRAINED, TRAINED + 1):
        prompt = next(tuple(p) for p in golden[0] if len(p) == length)
        sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True, temperature=0.7, seed=5, n=6)
        done = {c.sample: c.token_ids for c in engine.run([Request(0, prompt, sampling)])}
        alone = make_engine(NAME, torch.float32, {"prefix_cache": False}, seqs=1, block_size=16)
        expected = {c.sample: c.token_ids for c in alone.run([Request(0, prompt, sampling)])}
        assert len(set(done.values())) == 6
        assert done == expected
