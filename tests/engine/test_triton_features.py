"""What changes logits, and what is reported of them, by the Triton runner: the same as from the PyTorch runner.

The PyTorch runner looks at all tokens at every step; the device keeps token counts, and moves them with their rows.
Rows of every kind share few slots: a slot's next sequence would show what the last one left there.
"""

from functools import partial

import pytest

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.structured_outputs import GrammarSpec
from tests.engine.constraint import EveryThird
from tests.engine.small_models import VOCAB, device_engine, plain_engine
from tests.helpers.marks import ON_TRITON_RUNNER

pytestmark = [pytest.mark.matrix, *ON_TRITON_RUNNER, pytest.mark.usefixtures("few_programs")]
TRUNK = [(7 * i * i + 3 * i + 1) % VOCAB for i in range(12)]


ROWS = {
    "penalties": [
        (TRUNK[:8], {"max_tokens": 9, "repetition_penalty": 1.6, "ignore_eos": True}),
        (TRUNK[:8], {"max_tokens": 8, "presence_penalty": 1.5, "frequency_penalty": 0.5, "min_tokens": 8}),
        ([5, 9, 9], {"max_tokens": 9, "frequency_penalty": 2.0, "temperature": 0.9, "seed": 7, "n": 3}),
        (TRUNK[:10], {"max_tokens": 4, "ignore_eos": True}),
    ],
    "bias": [
        (TRUNK[:5], {"max_tokens": 6, "logit_bias": ((11, 100.0),)}),
        (TRUNK[:6], {"max_tokens": 7, "ignore_eos": True}),
        ([2], {"max_tokens": 9, "min_tokens": 6}),
        ([4, 8], {"max_tokens": 9, "logit_bias": ((28, 50.0), (3, 50.0)), "min_tokens": 5, "stop_token_ids": (9,)}),
        (TRUNK[:7], {"max_tokens": 5, "temperature": 0.7, "seed": 3, "ignore_eos": True}),
    ],
    "logprobs": [
        (TRUNK[:9], {"max_tokens": 6, "logprobs": 3, "ignore_eos": True}),
        (TRUNK[:4], {"max_tokens": 6, "logprobs": 0, "temperature": 0.8, "seed": 5, "n": 2}),
        (TRUNK, {"max_tokens": 3, "prompt_logprobs": 2, "repetition_penalty": 1.3, "logprobs": 1}),
        (TRUNK[:9], {"max_tokens": 5, "prompt_logprobs": 0}),
        ([6], {"max_tokens": 5, "prompt_logprobs": 4}),
    ],
    "grammar": [
        (TRUNK[:8], {"max_tokens": 12, "grammar": GrammarSpec("json_object"), "logprobs": 1}),
        (TRUNK[:3], {"max_tokens": 3, "grammar": GrammarSpec("json_object"), "frequency_penalty": 1.0}),
        (TRUNK[:6], {"max_tokens": 7, "ignore_eos": True}),
        ([5, 9], {"max_tokens": 20, "grammar": GrammarSpec("json_object"), "temperature": 0.9, "seed": 4, "n": 2}),
    ],
}


def run(engine, rows):
    """Of each completion its tokens and why it ended, then what is reported, which no two paths round alike."""
    for index, (prompt, sampling) in enumerate(rows):
        request = Request(index, tuple(prompt), SamplingParams(**sampling))
        engine.add(request, constraint=partial(EveryThird, VOCAB) if request.sampling.grammar else None)
    exact, reported = {}, []
    while engine.has_unfinished:
        for done in engine.step():
            key = done.request.id, done.sample
            exact[key] = done.token_ids, done.finish_reason
            reported += [(key, *logprob) for logprob in (*done.logprobs, *done.prompt_logprobs)]
        engine.scheduler.check_integrity()
    assert engine.scheduler.pool.num_free == engine.scheduler.pool.num_blocks
    return exact, sorted(reported)


@pytest.fixture(scope="module")
def expected():
    """What the PyTorch runner gives for the llama model, by kind of row."""
    return {kind: run(plain_engine("llama"), rows) for kind, rows in ROWS.items()}


def assert_same(actual, expected):
    """Tokens exactly; log-probabilities as the two paths round them."""
    assert actual[0] == expected[0]
    for found, other in zip(actual[1], expected[1], strict=True):
        (key, token, logprob, top, rank), (other_key, other_token, other_logprob, other_top, other_rank) = found, other
        assert (key, token, rank, [i for i, _ in top]) == (
            other_key,
            other_token,
            other_rank,
            [i for i, _ in other_top],
        )
        assert [logprob, *(p for _, p in top)] == pytest.approx([other_logprob, *(p for _, p in other_top)], abs=1e-4)


def test_the_rows_differ_from_what_they_were_without(expected):
    """Or the runs below would compare little: each of these changes what is generated."""
    for kind in ("penalties", "bias", "grammar"):
        names = ("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "min_tokens", "grammar")
        plain = [(p, {name: value for name, value in s.items() if name not in names}) for p, s in ROWS[kind]]
        tokens, without = expected[kind][0], run(plain_engine("llama"), plain)[0]
        changed = {index for index, _ in tokens if tokens[index, 0] != without[index, 0]}
        assert changed >= {i for i, (_, s) in enumerate(ROWS[kind]) if set(s) & set(names)}, kind
    assert len({tokens for (index, _), (tokens, _) in expected["penalties"][0].items() if index == 2}) == 3
    prompt, completion = 11, 3
    assert sum(key == (2, 0) for key, *_ in expected["logprobs"][1]) == prompt + completion


@pytest.mark.parametrize(
    ("kind", "off"),
    [("bias", ()), ("grammar", ("fused_sampler",)), ("penalties", ("fused_sampler", "late_results", "prefix_cache"))],
    ids=lambda value: value if isinstance(value, str) else "no " + ", ".join(value) if value else "all on",
)
@pytest.mark.usefixtures("unwritten_is_nan")
def test_equal_to_the_plain_runners(kind, off, expected):
    """With windows of steps, and one step at a time without shared prefixes; the rest below, with everything on."""
    assert_same(run(device_engine("llama", off), ROWS[kind]), expected[kind])


@pytest.mark.thorough
@pytest.mark.parametrize(("kind", "blocks"), [("penalties", 6), ("logprobs", 6), ("grammar", 5)])
@pytest.mark.usefixtures("unwritten_is_nan")
def test_after_preemptions(kind, blocks, expected):
    """Marks are made again from tokens that were generated before, grammars go on where they were."""
    engine = device_engine("llama", blocks=blocks)
    assert_same(run(engine, ROWS[kind]), expected[kind])
    assert engine.stats.preemptions > 0
