"""Token ids and lengths: the same for every engine and on every machine."""

import pytest

from rosebatch.bench.scenario import Range, Sampling, Scenario
from rosebatch.bench.workload import Workload, make_workload, require_fits
from rosebatch.core.errors import UserError
from rosebatch.core.sampling_params import SamplingParams


def scenario(**fields):
    return Scenario(**{"num_prompts": 2, "input_len": 3, "output_len": 4, **fields})


def test_exact_ids():
    """Figures in the docs belong to these ids: neither Python nor we may change them."""
    assert make_workload(scenario(), 1000) == Workload([[494, 530, 141], [365, 623, 597]], [4, 4])
    assert make_workload(scenario(seed=1), 1000).prompts == [[237, 682, 164], [361, 220, 607]]
    assert make_workload(scenario(), 1000, run=2).prompts == [[284, 556, 389], [316, 239, 301]]


def test_ids_keep_away_from_special_tokens():
    """The whole range is used and nothing outside it."""
    ids = [i for p in make_workload(scenario(input_len=2000), 500).prompts for i in p]
    assert set(ids) == set(range(100, 200))


@pytest.mark.parametrize("vocab", [1, 300, 400])
def test_vocabularies_too_small_to_keep_away(vocab):
    """The range of ids must not be empty."""
    ids = [i for p in make_workload(scenario(input_len=4000), vocab).prompts for i in p]
    assert set(ids) == set(range(vocab))


def test_lengths():
    """One length for all, lengths in turn, or lengths drawn with both ends included."""
    assert make_workload(scenario(num_prompts=5, input_len=(2, 7)), 1000).prompt_lens == [2, 7, 2, 7, 2]
    drawn = make_workload(scenario(num_prompts=200, output_len=Range(low=3, high=5)), 1000)
    assert set(drawn.output_lens) == {3, 4, 5}
    assert set(drawn.prompt_lens) == {3}


def test_runs_differ_in_ids_alone():
    """With the ids of the warm-up a prefix cache would skip all of prefill."""
    mixed = scenario(num_prompts=20, input_len=Range(low=1, high=9), output_len=Range(low=1, high=9))
    first, *others = [make_workload(mixed, 10**6, run) for run in range(4)]
    for other in others:
        assert (other.prompt_lens, other.output_lens) == (first.prompt_lens, first.output_lens)
    ids = [i for workload in (first, *others) for p in workload.prompts for i in p]
    assert len(set(ids)) > 0.99 * len(ids)


def test_a_shared_prefix():
    """All prompts of a run begin with the same tokens; input_len counts only the tokens after them."""
    for run in range(2):
        prompts = make_workload(scenario(shared_prefix_len=5), 10**6, run).prompts
        assert [len(prompt) for prompt in prompts] == [8, 8]
        assert prompts[0][:5] == prompts[1][:5]
        assert prompts[0][5:] != prompts[1][5:]


def test_requests():
    """Outputs have full length despite end tokens, and rows do not share random numbers."""
    sampling = Sampling(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1)
    requests = Workload([[1, 2], [3]], [4, 5]).requests(sampling)
    common = {"temperature": 0.5, "top_k": 3, "top_p": 0.9, "min_p": 0.1, "ignore_eos": True}
    assert [(r.id, r.prompt_token_ids, r.sampling) for r in requests] == [
        (0, (1, 2), SamplingParams(max_tokens=4, seed=0, **common)),
        (1, (3,), SamplingParams(max_tokens=5, seed=1, **common)),
    ]


def test_require_fits():
    """Prompt and output of the same row are added up."""
    workload = Workload([[1] * 7, [1] * 2], [2, 6])
    require_fits(workload, 9)
    with pytest.raises(UserError, match="have 9 tokens, but the engine holds at most 8: choose shorter"):
        require_fits(workload, 8)
