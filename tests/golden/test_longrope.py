"""Longrope: each sequence has the factors of its length, wherever it passes the trained length, as in transformers."""

import random

import pytest
import torch

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from tests.golden.conftest import NEW_TOKENS
from tests.helpers.families import reference_options
from tests.helpers.running import run, run_choices

NAME = "phi3-longrope"
TRAINED = 40


@pytest.fixture(scope="module")
def crossing(reference_tokens):
    """Prompts of all lengths about the trained one, most with a beginning in common, and transformers' answers.

    The shortest stay below it to the end, the next reach it with a token that is never computed, the longest begin
    behind it.
    """
    numbers = random.Random(1)
    trunk = [numbers.randrange(211) for _ in range(TRAINED + 4)]
    end = TRAINED - NEW_TOKENS
    lengths = [end - 1, end, end + 1, end + 2, 36, 39, 40, 41, 43] * 3
    prompts = []
    for length in lengths:
        common = numbers.choice([length, length - 1, 20, 0])
        prompts.append(trunk[:common] + [numbers.randrange(211) for _ in range(length - common)])
    tokens = reference_tokens(NAME, prompts, lambda length: reference_options(NAME))
    kept = sorted(tokens)
    assert {len(prompts[i]) for i in kept} == set(lengths), "each length has a prompt that rounding does not decide"
    return [prompts[i] for i in kept], [tokens[i] for i in kept]


@pytest.mark.parametrize(
    "limits",
    [
        {"chunked_prefill": False, "prefix_cache": False},
        {"seqs": 1, "prefix_cache": False},
        {"seqs": 5, "chunk": 7, "block_size": 4},
        {"seqs": 6, "chunk": 16, "block_size": 8, "blocks": 11, "prefix_cache": False},
        {"seqs": 6, "chunk": 16, "block_size": 8, "blocks": 11},
    ],
    ids=["whole", "alone", "chunks", "few blocks, no prefixes", "few blocks"],
)
def test_an_answer_crosses_the_trained_length(limits, crossing, goldens, make_engine, greedy_tokens):
    """Keys with short factors stayed in the cache when a sequence grew longer, or it started over a token off.

    With few blocks, sequences are preempted on either side of the trained length, and others resume in between.
    """
    prompts, expected = crossing
    engine = make_engine(goldens(NAME).folder, **limits)
    assert greedy_tokens(engine, prompts) == expected
    assert bool(engine.stats.preemptions) == ("blocks" in limits)


def test_a_run_within_the_trained_length_has_short_factors(crossing, goldens, make_engine, greedy_tokens):
    """Its tables are for short factors only: a sequence must not look for long ones, at its very end either."""
    fitting = [(p, t) for p, t in zip(*crossing, strict=True) if len(p) + NEW_TOKENS <= TRAINED]
    prompts, expected = map(list, zip(*fitting, strict=True))
    assert greedy_tokens(make_engine(goldens(NAME).folder, max_model_len=TRAINED), prompts) == expected


def test_short_and_long_sequences_share_no_prefix(goldens, make_engine, reference_tokens):
    """A long prompt took the blocks of a short one, whose keys have short factors, and the other way round."""
    trunk = [(7 * i * i + 3 * i + 1) % 211 for i in range(60)]
    prompts = [trunk[:24], trunk[:48], trunk[:26], trunk[:56], trunk[:33]]
    expected = reference_tokens(NAME, prompts, lambda length: reference_options(NAME))
    assert len(expected) == len(prompts), "rounding decides none of them"
    engine, cached = make_engine(goldens(NAME).folder, block_size=4), []
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
        done = run(engine, [Request(number, tuple(prompt), sampling)])[number]
        assert list(done.token_ids) == expected[number]
        cached.append(done.cached_tokens)
    assert cached == [0, 0, 24, 48, 24]


@pytest.mark.whole
@pytest.mark.parametrize("length", [TRAINED - 6, TRAINED, TRAINED + 1])
@pytest.mark.parametrize("blocks", [0, 16])
def test_completions_of_a_prompt_start_over_one_by_one(length, blocks, goldens, make_engine, reference_model):
    """They share the prompt's blocks with short factors; forks of a long prompt must have long factors as well.

    Each token's log-probability is transformers' for its factors: short up to the trained length, else long.
    """
    prompt = [(5 * i * i + i + 9) % 211 for i in range(length)]
    sampling = SamplingParams(max_tokens=10, ignore_eos=True, n=4, temperature=1.0, seed=3, logprobs=1)
    engine = make_engine(goldens(NAME).folder, block_size=4, blocks=blocks, seqs=3)
    done = run_choices(engine, [Request(0, tuple(prompt), sampling)])
    assert len({completion.token_ids for completion in done.values()}) == 4
    for completion in done.values():
        sequence = torch.tensor([*prompt, *completion.token_ids])
        with torch.inference_mode():
            short, long = (
                reference_model(NAME)(tokens[None]).logits[0].log_softmax(-1)
                for tokens in (sequence[:TRAINED], sequence)
            )
        for position, found in enumerate(completion.logprobs, start=length):
            exact = (short if position <= TRAINED else long)[position - 1, found.token_id].item()
            assert found.logprob == pytest.approx(exact, abs=1e-4)
