"""States of sequences that move between rows, are copied or preempted: the same tokens as of each row alone."""

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
# Rows with 15 or 9 tokens in common, and then of their own: blocks have four. Each comes twice.
BEGINNING = tuple((5 * i * i + i) % VOCAB for i in range(15))
TOGETHER = [(*BEGINNING[:common], 40 + own, *PROMPTS[1][:own]) for own, common in enumerate((15, 15, 9, 15))] * 2
FAMILIES = ["qwen3_5", *(pytest.param(name, marks=pytest.mark.thorough) for name in ("qwen3_next", "lfm2"))]


def requests(n=1):
    return [
        Request(k, prompt, SamplingParams(max_tokens=length, ignore_eos=True, n=n))
        for k, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True))
    ]


def together(n=1):
    sampling = SamplingParams(max_tokens=4, ignore_eos=True, n=n)
    return [Request(k, prompt, sampling) for k, prompt in enumerate(TOGETHER)]


def run(engine, requests):
    """Tokens by request and sample."""
    return {key: done.token_ids for key, done in run_choices(engine, requests).items()}


@pytest.fixture(scope="module")
def alone():
    """Of each request in an engine of its own."""
    return {key: tokens for each in requests() for key, tokens in run(plain_engine("qwen3_5"), [each]).items()}


@pytest.mark.parametrize("kind", [plain_engine, pytest.param(device_engine, marks=pytest.mark.thorough)])
def test_completions_of_a_request(kind, alone):
    """Each goes on in a slot of its own: a shared one would be advanced by all of them.

    A sequence moves when others end: one that left its state behind would go on from another's.
    """
    engine = kind("qwen3_5")
    done = run(engine, requests(n=2))
    assert done == {(request, sample): alone[request, 0] for request in range(len(LENGTHS)) for sample in (0, 1)}
    # The second completions compute the last token of the prompt alone.
    assert engine.stats.computed_tokens == sum(map(len, PROMPTS)) + sum(2 * length - 1 for length in LENGTHS)
    if kind is device_engine:
        states = engine.runner.slots.state_of
        assert sorted(states) == list(range(SLOTS)) != states, "no sequence has moved"


@pytest.mark.thorough
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("blocks", [60, pytest.param(14, marks=pytest.mark.thorough)])
def test_rows_that_begin_alike(name, blocks):
    """On the device, a snapshot that was copied a step late, or to where a row was before, would give other tokens."""
    wanted = run(plain_engine(name, snapshots=0, share_prompts=False, prefix_cache=False), together())
    engine = device_engine(name, blocks=blocks)
    for n in (1, 2):
        done = run(engine, together(n))
        assert done == {
            (request, sample): wanted[request, 0] for request in range(len(TOGETHER)) for sample in range(n)
        }
        engine.abort()
    own = sum(len(prompt) + 3 for prompt in TOGETHER)
    assert engine.stats.computed_tokens < 2 * own


@pytest.mark.thorough
def test_a_preempted_sequence_starts_over(alone):
    """With blocks for two sequences at a time; what it generated before is computed again as part of its chunk."""
    engine = device_engine("qwen3_5", blocks=7)
    assert run(engine, requests()) == alone
    assert engine.stats.preemptions
