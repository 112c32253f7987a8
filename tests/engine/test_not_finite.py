"""Logits that are not finite: the sequence fails, and nobody else notices."""

import pytest
import torch

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.plan import NOT_FINITE
from rosebatch.engine.scheduling.sequence import SequenceState
from rosebatch.model.mixers.paged_attention.mixer import PagedAttentionSpec
from tests.engine import small_models
from tests.engine.small_models import device_engine, plain_engine
from tests.helpers.marks import needs_interpreter
from tests.helpers.running import run, run_choices

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def grouped_engine(name, **options):
    return device_engine(name, ("fused_sampler",), **options)


BROKEN = 48
ENGINES = [
    pytest.param(plain_engine, id="plain"),
    pytest.param(device_engine, id="device", marks=needs_interpreter),
    pytest.param(grouped_engine, id="grouped", marks=needs_interpreter),
]


@pytest.fixture
def broken_token(monkeypatch):
    """One token's embedding is NaN. The models do not tie it to their output, so other rows' logits stay finite."""
    whole = small_models.Weights.get

    def get(self, name, shape, **options):
        weight = whole(self, name, shape, **options)
        if "embed_tokens" in name:
            weight[BROKEN] = float("nan")
        return weight

    monkeypatch.setattr(small_models.Weights, "get", get)


def requests(with_broken):
    """Prompts of several blocks, sampled and greedy; the broken ones give their blocks back while others come."""
    found = []
    for number in range(5):
        prompt = [(number * 11 + 3 * i) % 40 for i in range(5 + number % 3)]
        broken = number in (0, 3)
        if broken:
            prompt[3] = BROKEN
        sampling = SamplingParams(max_tokens=4, ignore_eos=True, temperature=number % 2 * 0.9, seed=number)
        if with_broken or not broken:
            found.append(Request(number, tuple(prompt), sampling))
    return found


@pytest.mark.matrix
@pytest.mark.parametrize("make", ENGINES)
@pytest.mark.parametrize("name", ["llama", "hp1"])
@pytest.mark.usefixtures("broken_token")
def test_only_the_sequence_itself_fails(make, name):
    """NaN in blocks that were given back spread to other rows: masked keys are multiplied by 0."""
    expected = run(make(name), requests(with_broken=False))
    found = run(make(name), requests(with_broken=True))
    failed = {number for number, completion in found.items() if completion.error is not None}
    assert (failed, {found[number].error.code for number in failed}) == ({0, 3}, {"non_finite_logits"})
    whole = {n: c.token_ids for n, c in found.items() if n not in failed}
    assert whole == {n: c.token_ids for n, c in expected.items()}
    assert all(completion.error is None for completion in expected.values())


@pytest.mark.matrix
@pytest.mark.parametrize("make", ENGINES)
@pytest.mark.usefixtures("broken_token")
def test_a_later_token_may_be_the_first_without_logits(make):
    """In the middle of a window: tokens after it were empty text, and the row counted as completed."""
    sampling = SamplingParams(max_tokens=9, ignore_eos=True, logit_bias=((BROKEN, 1000.0),), min_tokens=2, logprobs=2)
    plain = Request(1, (5, 6, 7), SamplingParams(max_tokens=9, ignore_eos=True))
    found = run(make("llama"), [Request(0, (5, 6, 7), sampling), plain])
    assert found[0].token_ids == (BROKEN,)
    assert found[0].error.message == "the model's logits for token 2 of the answer are not finite"
    assert found[1].error is None and len(found[1].token_ids) == 9


@pytest.mark.matrix
@pytest.mark.parametrize("make", ENGINES)
@pytest.mark.usefixtures("broken_token")
def test_a_prefix_of_a_failed_sequence_is_computed_anew(make):
    """Its cached blocks hold NaN from the second layer on: whoever found them failed too, for ever."""
    shared = [(3 * i) % 40 for i in range(8)]
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    engine = make("llama")
    failed = run(engine, [Request(0, (*shared, BROKEN, 1), sampling)])
    found = run(engine, [Request(1, (*shared, 2, 1), sampling)])
    assert failed[0].error is not None
    assert found[1].error is None and found[1].cached_tokens == 0


@pytest.mark.matrix
@pytest.mark.parametrize("make", ENGINES)
def test_completions_of_one_prompt_all_fail(make, broken_token):
    """Forks hold their prompt's blocks while the first of them is given up."""
    engine = make("hp1")
    sampling = SamplingParams(max_tokens=3, n=4, temperature=1.0, seed=1)
    done = run_choices(engine, [Request(0, (1, BROKEN, 2, 3, 4, 5), sampling)]).values()
    assert [completion.error.code for completion in done] == ["non_finite_logits"] * 4
    assert torch.isfinite(torch.tensor([c.finish_time for c in done])).all()


def _two_windows(weight, rotary):
    heads = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "scale": 0.3, "window": 3}
    return [PagedAttentionSpec(layer=layer, rotary=rotary(16), **heads) for layer in range(2)]


@pytest.mark.matrix
@pytest.mark.parametrize("make", ENGINES)
def test_what_no_token_saw_of_a_long_prompt_spreads_to_nobody(make, monkeypatch):
    """Prompt blocks left all windows before a token was sampled: it was finite, and their NaN went to the next row."""
    monkeypatch.setitem(small_models._SPECS, "windows", _two_windows)
    monkeypatch.setitem(small_models.MODELS, "windows", small_models.MODELS["uneven"])
    engine = make("windows", blocks=6)
    engine.runner.model.embedding[BROKEN] = float("nan")
    short = [Request(1 + i, (5 + i,), SamplingParams(max_tokens=2, ignore_eos=True)) for i in range(3)]
    expected = run(engine, short)
    prompt = (BROKEN, *(i % 40 for i in range(30)))
    done = run(engine, [Request(0, prompt, SamplingParams(max_tokens=2, ignore_eos=True))])
    assert done[0].error is None, "or the test shows nothing"
    found = {n: (c.token_ids, c.error) for n, c in run(engine, short).items()}
    assert found == {n: (c.token_ids, None) for n, c in expected.items()}


@pytest.mark.matrix
@pytest.mark.parametrize("make", ENGINES)
@pytest.mark.usefixtures("broken_token")
def test_rows_that_were_dropped_in_their_prompts(make):
    """Nobody had sampled behind their NaN yet: later rows of the same engine got it with their blocks, and failed."""
    engine = make("llama", blocks=8)
    short = [Request(9 + i, (5 + i, 3, 2), SamplingParams(max_tokens=3, ignore_eos=True)) for i in range(9)]
    expected = run(engine, short)
    for number in range(3):
        engine.add(Request(number, (number, *[BROKEN] * 25), SamplingParams(max_tokens=2)))
        assert not engine.step()
        engine.abort()
    found = {n: (c.token_ids, c.error) for n, c in run(engine, short).items()}
    assert found == {n: (c.token_ids, None) for n, c in expected.items()}


def test_a_stop_string_before_counts():
    """Tokens of the window up to the stop are good: the sequence has ended there."""
    stopping = SamplingParams(max_tokens=9, stop_token_ids=(7,))
    sequence = SequenceState.start(Request(0, (1, 2), stopping), id=0, max_model_len=40, stop_ids=frozenset({7}))
    assert sequence.apply_token_ids([3, 7, 4, NOT_FINITE]) == 2
    assert (sequence.finish_reason, sequence.not_finite) == ("stop", False)
