"""Log-probabilities of continuations in fp32 equal transformers', whatever the schedule was."""

import functools

import numpy as np
import pytest
import torch

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.scoring import Scoring
from tests.golden.test_embeddings import CASES
from tests.helpers.running import run

TOLERANCE = 2e-5


def requests_of(golden):
    """Contexts with continuations of a prompt's own tokens, and with several tokens that may follow it."""
    found = []
    for number, prompt in enumerate(golden.prompts[:16]):
        length = len(prompt)
        start = 1 if number % 4 == 0 else max(1, length - number % 4)
        following = (prompt[0], 1, (7 * number) % 50, 1)[: 1 + number % 4]
        found.append(Request(number, tuple(prompt), scoring=Scoring(min(start, length), following)))
    return found


def values_of(completion):
    return np.array([each.logprob for each in completion.prompt_logprobs])


@pytest.fixture(scope="session")
def expected(transformers, goldens):
    """transformers' log-probabilities of what each request asks for, in fp64, and a tolerance.

    Some models multiply what is rounded: there it is four times what transformers' own fp32 is away.
    """

    def scores(name, dtype):
        own = {"dtype": dtype, "experts_implementation": "eager"}
        model = transformers.AutoModelForCausalLM.from_pretrained(goldens(name).folder, **own).eval()
        for request in requests_of(goldens(name)):
            ids, scoring = torch.tensor([request.prompt_token_ids]), request.scoring
            with torch.inference_mode():
                logits = model(ids, attention_mask=torch.ones_like(ids)).logits[0].double()
            every = logits.log_softmax(-1)
            own = [every[at - 1, request.prompt_token_ids[at]] for at in range(scoring.start, ids.shape[1])]
            yield np.array([*own, *(every[-1, token] for token in scoring.next_token_ids)])

    @functools.cache
    def both(name):
        pairs = zip(*(scores(name, dtype) for dtype in (torch.float64, torch.float32)), strict=True)
        return [(exact, max(TOLERANCE, 4 * np.abs(exact - rounded).max())) for exact, rounded in pairs]

    return both


@pytest.mark.whole
@pytest.mark.parametrize("name", CASES)
def test_whole_chunked_and_from_the_prefix_cache(name, goldens, expected, make_engine):
    """A position off by one, another chunk's rows, or a context that is taken from the cache with the token before."""
    golden = goldens(name)
    whole = make_engine(golden.folder, chunked_prefill=False, prefix_cache=False)
    chunked = make_engine(golden.folder, seqs=3, chunk=16, block_size=4, blocks=60)
    for engine in (whole, chunked, chunked):
        done = run(engine, requests_of(golden))
        for request, (right, tolerance) in zip(requests_of(golden), expected(name), strict=True):
            completion = done[request.id]
            assert completion.finish_reason == "scored"
            assert completion.token_ids == ()
            wanted = [*request.prompt_token_ids[request.scoring.start :], *request.scoring.next_token_ids]
            assert [each.token_id for each in completion.prompt_logprobs] == wanted
            np.testing.assert_allclose(values_of(completion), right, rtol=0, atol=tolerance)


def test_no_bit_depends_on_the_schedule(goldens, make_engine):
    """A resumed run scores rows in other batches and chunks: its bytes must be those of a run without a break."""
    golden = goldens("llama")
    alone = make_engine(golden.folder, seqs=1, chunked_prefill=False, prefix_cache=False)
    right = run(alone, requests_of(golden))
    small = {"chunk": 50, "block_size": 4, "blocks": 40}
    for limits in ({}, {"chunk": 7, "block_size": 5}, small, {"seqs": 20, "prefix_cache": False}):
        found = run(make_engine(golden.folder, **limits), requests_of(golden)[::-1])
        for number, done in found.items():
            assert values_of(done).tobytes() == values_of(right[number]).tobytes(), limits


def test_the_context_comes_from_the_prefix_cache(goldens, make_engine):
    """A prompt whose tokens are all scored takes nothing of it; with a start, all blocks before that."""
    golden = goldens("llama")
    prompt = max(golden.prompts, key=len)
    engine = make_engine(golden.folder, block_size=4)
    half, end = len(prompt) // 8 * 4, len(prompt)
    for start, cached in ((1, 0), (1, 0), (half, half - 4), (half + 1, half), (end, (end - 1) // 4 * 4)):
        done = run(engine, [Request(0, tuple(prompt), scoring=Scoring(start, (1,)))])[0]
        assert done.cached_tokens == cached
    # Those of its blocks that scores have computed serve others.
    sampled = run(engine, [Request(0, tuple(prompt), SamplingParams(max_tokens=2))])[0]
    assert sampled.cached_tokens == min(end // 4 * 4, end - 1)


def test_scores_beside_completions_and_preempted(goldens, make_engine):
    """Rows that are sampled and rows that are scored come from one forward pass: either could take the other's."""
    golden = goldens("llama")
    scored = requests_of(golden)
    sampled = [
        Request(100 + i, tuple(prompt), SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0))
        for i, prompt in enumerate(golden.prompts[:8])
    ]
    mixed = [each for pair in zip(scored, [*sampled, *sampled], strict=True) for each in pair][:24]
    requests = list({request.id: request for request in mixed}.values())
    right = run(make_engine(golden.folder, seqs=1, prefix_cache=False), requests)
    tight = make_engine(golden.folder, seqs=8, chunk=9, block_size=4, blocks=30)
    found = run(tight, requests)
    assert tight.stats.preemptions > 0
    for number, done in found.items():
        assert done.token_ids == right[number].token_ids
        assert values_of(done).tobytes() == values_of(right[number]).tobytes()
