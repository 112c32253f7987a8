"""States of sequences that move between rows, are preempted, or share a request: the same tokens as run alone."""

import pytest

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from tests.engine.small_models import SLOTS, VOCAB, device_engine, plain_engine
from tests.helpers.marks import ON_TRITON_RUNNER
from tests.helpers.running import run_choices

pytestmark = ON_TRITON_RUNNER
# The first sequences end first, so that the last ones move into their rows.
LENGTHS = (3, 4, 11, 7, 5)
PROMPTS = [tuple((7 * i * i + 3 * i + k) % VOCAB for i in range(3 + 2 * k)) for k in range(len(LENGTHS))]


def requests(n=1):
    return [
        Request(k, prompt, SamplingParams(max_tokens=length, ignore_eos=True, n=n))
        for k, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
    ]


def run(engine, requests):
    """Tokens by request and sample."""
    return {key: done.token_ids for key, done in run_choices(engine, requests).items()}


@pytest.fixture(scope="module")
def alone():
    """Of each request in an engine of its own."""
    return {key: tokens for each in requests() for key, tokens in run(plain_engine("qwen3_5"), [each]).items()}


@pytest.mark.parametrize("kind", [plain_engine, pytest.param(device_engine, marks=pytest.mark.thorough)])
def test_completions_of_a_request(kind, alone):
    """Each has a slot of its own and computes the prompt: a shared one would be advanced by all of them.

    A sequence moves when others end: one that left its state behind would go on from another's.
    """
    engine = kind("qwen3_5")
    done = run(engine, requests(n=2))
    assert done == {(request, sample): alone[request, 0] for request in range(len(LENGTHS)) for sample in (0, 1)}
    if kind is device_engine:
        states = engine.runner.slots.state_of
        assert sorted(states) == list(range(SLOTS)) != states, "no sequence has moved"


@pytest.mark.thorough
def test_a_preempted_sequence_starts_over(alone):
    """With blocks for two sequences at a time; what it generated before is computed again as part of its chunk."""
    engine = device_engine("qwen3_5", blocks=7)
    assert run(engine, requests()) == alone
    assert engine.stats.preemptions
