"""Workers compile kernels before their first row."""

from types import SimpleNamespace

import pytest

from rosebatch.engine.scheduling.servable import require_servable
from rosebatch.job.workers.first_compile import run_briefly


@pytest.mark.parametrize("longest", [2, 5, 64])
def test_short_prompts_fit_any_model(longest):
    """A model with room for two tokens failed before its first row."""

    class Engine:
        max_model_len, generates = longest, True

        def run(self, requests):
            for request in requests:
                assert len(request.prompt_token_ids) >= 1
                assert request.sampling.max_tokens >= 1
                assert len(request.prompt_token_ids) + request.sampling.max_tokens <= longest
                yield request

    run_briefly(Engine())


def test_a_model_that_only_embeds():
    """It was asked to generate: each worker on a GPU died as soon as it was loaded."""
    asked = []
    run_briefly(SimpleNamespace(max_model_len=64, generates=False, run=lambda requests: asked.extend(requests) or []))
    assert asked
    for request in asked:
        require_servable(request, 1, 64, generates=False)
