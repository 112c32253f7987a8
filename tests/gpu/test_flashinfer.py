"""On a GPU: an engine that samples with FlashInfer's kernels."""

import pytest

from rosebatch.config.run import RunConfig
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.launch.launch import launch

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.fixture
def generate(saved_model):
    """The tokens of 40 prompts of several lengths, all sampled with these parameters."""
    pytest.importorskip("flashinfer")

    def run(sampler, **sampling):
        config = RunConfig.of(
            str(saved_model("Llama")),
            device="cuda",
            dtype="float32",
            sampler=sampler,
            max_num_seqs=16,
            kv_cache_memory=1 << 28,
        )
        launched = launch(config)
        assert launched.description["sampler"] == sampler
        params = SamplingParams(max_tokens=12, ignore_eos=True, **sampling)
        prompts = [tuple(range(i + 1)) for i in range(40)]
        requests = [Request(i, p, params) for i, p in enumerate(prompts)]
        done = {c.request.id: list(c.token_ids) for c in launched.engine.run(requests)}
        return [done[index] for index in range(len(prompts))]

    return run


@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}, {"top_k": 3, "min_p": 1.0}])
def test_filters_that_leave_one_token(generate, filters):
    """With one token left each kernel is greedy: rows, parameters or tokens of a neighbour would show."""
    assert generate("flashinfer", temperature=1.0, **filters) == generate("rosebatch")


@pytest.mark.parametrize("filters", [{}, {"top_k": 50, "top_p": 0.9}])
def test_sampled_answers_vary(generate, filters):
    """Each step has its own random numbers, and the same file gives the same answers."""
    answers = generate("flashinfer", temperature=5.0, **filters)
    assert [len(answer) for answer in answers] == [12] * 40
    assert all(len(set(answer)) > 2 for answer in answers)
    assert generate("flashinfer", temperature=5.0, **filters) == answers
