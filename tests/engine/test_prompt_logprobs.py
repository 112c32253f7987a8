"""Log-probabilities of prompts, where steps follow each other without the host and where a sequence starts over."""

import pytest

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from tests.engine.family_models import FAMILIES
from tests.engine.small_models import VOCAB, device_engine, plain_engine
from tests.helpers.marks import needs_interpreter
from tests.helpers.running import run


@needs_interpreter
# The interpreter computes with numpy, which warns of numbers in rows that nobody reads.
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.usefixtures("few_programs")
def test_three_steps_that_fetch_much():
    """Each fetches prompts' log-probabilities, tokens and theirs: nine fetches for eight buffers ended the run."""
    sampling = SamplingParams(max_tokens=3, prompt_logprobs=1, logprobs=1, ignore_eos=True)
    requests = [Request(i, tuple((3 * j + i) % VOCAB for j in range(8)), sampling) for i in range(3)]
    engine = device_engine("llama")
    planner = engine.scheduler.planner
    planner.max_num_batched_tokens = planner.max_chunk = 8
    found, expected = run(engine, requests), run(plain_engine("llama"), requests)
    for number, completion in found.items():
        assert completion.token_ids == expected[number].token_ids
        assert [each.token_id for each in completion.prompt_logprobs] == list(requests[number].prompt_token_ids[1:])


def test_a_prompt_is_scored_once():
    """A row that grew past the trained length started over, and its short prompt was scored with long factors."""
    trained = FAMILIES["phi3-longrope"].rope.original_max_position_embeddings
    prompt = tuple((7 * i * i + 3) % VOCAB for i in range(trained - 3))
    scores = []
    for length in (2, 8):
        sampling = SamplingParams(max_tokens=length, prompt_logprobs=0, ignore_eos=True)
        scores.append(run(plain_engine("phi3-longrope"), [Request(0, prompt, sampling)])[0].prompt_logprobs)
    assert scores[0] == scores[1]
