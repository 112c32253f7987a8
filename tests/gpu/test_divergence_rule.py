"""The rule of the first divergence, on made-up logits. Needs no GPU."""

import pytest
import torch

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.load import load_engine
from rosebatch.model.source import ModelSource
from tests.gpu.divergence import (
    ROUNDINGS,
    Divergence,
    assert_close_calls,
    first_divergences,
    logits_after,
    max_divergences,
    objection,
)
from tests.helpers.model_configs import small_config

DTYPES = [torch.float16, torch.bfloat16]
TOKEN = Divergence(sequence=0, position=0, ours=7, theirs=3)


def ranked(*order, step=0.001):
    """Logits of 50 tokens. These are on top in this order, ``step`` apart, the largest is 8."""
    logits = torch.linspace(-8, 0, 50)
    logits[list(order)] = 8 - step * torch.arange(len(order))
    return logits


def test_only_the_first_difference_of_a_sequence_counts():
    """After a first difference the sequences have nothing in common."""
    ours = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]
    theirs = [[1, 2, 3], [4, 0, 0], [0, 0, 9]]
    assert first_divergences(ours, ours) == []
    assert first_divergences(ours, theirs) == [Divergence(1, 1, 5, 0), Divergence(2, 0, 7, 0)]


def test_a_missing_token_is_no_divergence_but_an_error():
    """An engine that stops early must not pass for one that agrees."""
    with pytest.raises(AssertionError, match="sequence 1 has 2 tokens instead of 3"):
        first_divergences([[1, 2, 3], [1, 2]], [[1, 2, 3], [1, 2, 3]])
    with pytest.raises(ValueError, match="zip"):
        first_divergences([[1]], [[1], [2]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_two_close_tokens_in_either_order_are_a_close_call(dtype):
    """Rounding decides between them."""
    assert objection(TOKEN, ranked(7, 3), ranked(3, 7), dtype) == ""
    assert objection(TOKEN, ranked(9, 1, 2, 7, 3), ranked(3, 7), dtype) == ""


def test_equal_logits_share_a_place():
    """Rounding makes many logits equal: their order must not count against a token."""
    everything_equal = torch.ones(50)
    assert objection(TOKEN, everything_equal, everything_equal, torch.bfloat16) == ""


@pytest.mark.parametrize("far", [ranked(7, 1, 2, 4, 5, 3), ranked(3, 1, 2, 4, 5, 7)])
def test_a_token_outside_of_the_first_few_of_either_side_is_rejected(far):
    """Both sides must rank both tokens among the first few."""
    close = ranked(7, 3)
    assert "number 6 for rosebatch" in objection(TOKEN, far, close, torch.bfloat16)
    assert "number 6 for transformers" in objection(TOKEN, close, far, torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_second_choice_by_a_wide_margin_is_rejected(dtype):
    """Rounding does not explain a wide margin."""
    allowed = ROUNDINGS * torch.finfo(dtype).eps * 8
    near, wide = ranked(7, 3, step=0.9 * allowed), ranked(7, 3, step=1.1 * allowed)
    assert objection(TOKEN, near, near, dtype) == ""
    assert "below the likeliest for rosebatch" in objection(TOKEN, wide, near, dtype)
    assert "below the likeliest for transformers" in objection(TOKEN, near, wide, dtype)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_logits_that_are_not_finite_are_rejected(value):
    """No number is larger than NaN, so every token would pass for the likeliest."""
    broken = ranked(7, 3)
    broken[40] = value
    assert "rosebatch has logits" in objection(TOKEN, broken, ranked(7, 3), torch.float16)
    assert "transformers has logits" in objection(TOKEN, ranked(7, 3), broken, torch.float16)


class MadeUp:
    """A model whose logits are random numbers made from the prefix, with rounding of its own."""

    def __init__(self, dtype, seed):
        self.dtype, self.seed = dtype, seed

    def logits(self, prefix):
        exact = 2 * torch.randn(211, generator=torch.Generator().manual_seed(hash(tuple(prefix))))
        noise = torch.randn(211, generator=torch.Generator().manual_seed(hash((*prefix, self.seed))))
        return (exact + torch.finfo(self.dtype).eps * exact.abs().max() * noise).to(self.dtype).float()

    def generate(self, sequence):
        tokens = [sequence]
        for _ in range(32):
            tokens.append(int(self.logits(tokens).argmax()))
        return tokens[1:]


@pytest.fixture(scope="module", params=DTYPES, ids=str)
def made_up(request):
    """A check of tokens against a made-up model's, and the tokens of another one that rounds differently."""
    dtype = request.param
    engine, judge, exact = MadeUp(dtype, 1), MadeUp(dtype, 2), MadeUp(torch.float32, 0)
    theirs = [judge.generate(i) for i in range(64)]
    limit = max_divergences([exact.generate(i) for i in range(64)], theirs)

    def check(ours):
        found = first_divergences(ours, theirs)

        def prefix(divergence):
            return [divergence.sequence, *theirs[divergence.sequence][: divergence.position]]

        assert_close_calls(
            found, lambda d: engine.logits(prefix(d)), lambda d: judge.logits(prefix(d)), dtype, limit=limit, total=64
        )

    return check, [engine.generate(i) for i in range(64)]


def test_other_rounding_passes(made_up):
    """The rule must not reject a correct engine."""
    check, tokens = made_up
    check(tokens)


@pytest.mark.parametrize("sequence", range(0, 64, 9))
def test_one_shifted_token_is_rejected(made_up, sequence):
    """The negative control: an engine that gives a wrong id once must fail."""
    check, tokens = made_up
    shifted = [list(row) for row in tokens]
    shifted[sequence][0] = (shifted[sequence][0] + 1) % 211
    with pytest.raises(AssertionError, match=r"of 64 sequences diverged, \d+ may; 1 were no close call"):
        check(shifted)


def test_too_many_close_calls_are_rejected():
    """A small error everywhere causes many close calls, none of them suspicious alone."""
    divergences = [Divergence(index, 0, 7, 3) for index in range(9)]
    close = {"our_logits": lambda _: ranked(7, 3), "their_logits": lambda _: ranked(3, 7), "dtype": torch.float16}
    assert_close_calls(divergences, limit=9, total=64, **close)
    with pytest.raises(AssertionError, match="9 of 64 sequences diverged, 8 may; 0 were no close call"):
        assert_close_calls(divergences, limit=8, total=64, **close)


def test_logits_of_an_engine_after_a_prefix():
    """Its likeliest token must be the generated one, and the engine must be unchanged afterwards."""
    biases = dict.fromkeys(("qkv_bias", "out_bias", "mlp_bias"), True)
    config = small_config(family="gpt2", num_kv_heads=2, activation="gelu", tie_word_embeddings=True, **biases)
    device = torch.device("cpu")
    source = ModelSource("tiny", config, None, "dummy", torch.float32)
    engine = load_engine(source, RunConfig(kv_cache_memory=1 << 20), Switches.resolve({}, "cpu"), device).engine
    sampling = SamplingParams(max_tokens=8)
    (done,) = engine.run([Request(0, (4, 9), sampling)])
    compute = engine.runner.model.logits
    for length in (1, 7):
        logits = logits_after(engine, [4, 9, *done.token_ids[:length]])
        assert logits.shape == (50,)
        assert int(logits.argmax()) == done.token_ids[length]
    assert engine.runner.model.logits is compute
