"""Workers compile kernels before their first row."""

import pytest

from rosebatch.job.workers.first_compile import run_briefly


@pytest.mark.parametrize("longest", [2, 5, 64])
def test_short_prompts_fit_any_model(longest):
    """A model with room for two tokens failed before its first row."""

    class Engine:
        max_model_len = longest

        def run(self, requests):
            for request in requests:
                assert len(request.prompt_token_ids) >= 1
                assert request.sampling.max_tokens >= 1
                assert len(request.prompt_token_ids) + request.sampling.max_tokens <= longest
                yield request

    run_briefly(Engine())
