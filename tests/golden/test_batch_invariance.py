"""A sampled completion depends on its own request alone: the same bits alone, in a batch, in chunks, and resumed."""

import pytest
import torch
from msgspec import structs

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.torch_runner import runner
from tests.helpers.running import run

DTYPES = ["float32", *(["bfloat16"] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else [])]
CASES = [(model, dtype) for model in ("llama", "gpt2") for dtype in DTYPES]
# Keys and values of heads are products with latents, or another layer's.
CASES += [(model, dtype) for model in ("deepseek_v3", "gemma4_e") for dtype in DTYPES]
# Qwen3.5 and Falcon-H1 have layers with states. The fast tier takes the first case, so that all tests share one run.
WITH_STATES = [CASES[0], ("qwen3_5", DTYPES[-1]), ("falcon_h1", DTYPES[-1]), *CASES[1:]]
# More than a block of 4 or 5.
NEW_TOKENS = 6


@pytest.fixture
def recorded_logits(monkeypatch):
    """Every row of logits that a token is sampled from, by the request's seed and the token's position.

    Tokens alone would hide most differences: a changed bit rarely changes the choice.
    """
    rows, original = {}, runner.sample

    def sample(logits, params, positions, ops, staging, **options):
        for row, p, position in zip(logits, params, positions, strict=True):
            rows[p.seed, position] = row.clone()
        return original(logits, params, positions, ops, staging, **options)

    monkeypatch.setattr(runner, "sample", sample)
    return rows


@pytest.fixture
def results(recorded_logits):
    """Runs requests. Request id -> tokens, and (seed, position) -> logits."""

    def recorded(engine, requests):
        recorded_logits.clear()
        done = run(engine, requests)
        return {i: c.token_ids for i, c in done.items()}, dict(recorded_logits)

    return recorded


def requests_of(prompts):
    """Requests with a seed each, and with all kinds of sampling."""
    kinds = [{"top_p": 0.95}, {"top_p": 0.95}, {}, {"top_k": 20}, {"min_p": 0.05, "top_p": 0.9}]
    return [
        Request(
            i,
            tuple(prompt),
            SamplingParams(
                temperature=0.8, seed=1000 + i, max_tokens=NEW_TOKENS, ignore_eos=True, **kinds[i % len(kinds)]
            ),
        )
        for i, prompt in enumerate(prompts)
    ]


def assert_same(actual, expected):
    """Compares tokens and the logits behind them, bit for bit."""
    tokens, logits = actual
    expected_tokens, expected_logits = expected
    assert logits.keys() == expected_logits.keys()
    different = [key for key, row in expected_logits.items() if not torch.equal(logits[key], row)]
    assert different == []
    assert tokens == expected_tokens


@pytest.fixture(scope="module")
def alone_cache():
    return {}


@pytest.fixture
def alone(alone_cache, goldens, make_engine, results):
    """Each request in a run of its own, with whole prompts and nothing shared: the reference for all other runs."""

    def run(model, dtype):
        if (model, dtype) not in alone_cache:
            engine = make_engine(goldens(model).folder, dtype, seqs=1, chunked_prefill=False, prefix_cache=False)
            alone_cache[model, dtype] = results(engine, requests_of(goldens(model).prompts))
            assert engine.stats.max_running == 1
        return alone_cache[model, dtype]

    return run


# HP1 differs from Llama in attention alone, and most of all in 16 bits.
@pytest.mark.parametrize(("model", "dtype"), [CASES[0], ("hp1", DTYPES[-1]), *WITH_STATES[1:]])
def test_alone_equals_a_batch_of_64(model, dtype, goldens, make_engine, results, alone):
    """Neighbours in the batch must not change a bit."""
    expected = alone(model, dtype)
    engine = make_engine(goldens(model).folder, dtype)
    assert_same(results(engine, requests_of(goldens(model).prompts)), expected)
    assert engine.stats.max_running == 64


@pytest.mark.parametrize(("model", "dtype"), CASES)
def test_the_order_of_the_requests_does_not_matter(model, dtype, goldens, make_engine, results, alone):
    """A request's place in the batch must not change a bit."""
    expected = alone(model, dtype)
    engine = make_engine(goldens(model).folder, dtype, seqs=20)
    assert_same(results(engine, requests_of(goldens(model).prompts)[::-1]), expected)


@pytest.mark.parametrize(("chunk", "count"), [(1, 8), (7, 32), (100, 64)])
@pytest.mark.parametrize(("model", "dtype"), WITH_STATES)
def test_the_chunk_size_does_not_matter(model, dtype, chunk, count, goldens, make_engine, results, alone):
    """How prompts are cut into chunks must not change a bit, although a chunk of one token looks like a decode."""
    tokens, logits = alone(model, dtype)
    requests = requests_of(goldens(model).prompts)[:count]
    engine = make_engine(goldens(model).folder, dtype, chunk=chunk, block_size=5)
    chosen = {request.id for request in requests}
    expected = (
        {i: t for i, t in tokens.items() if i in chosen},
        {key: row for key, row in logits.items() if key[0] - 1000 in chosen},
    )
    assert_same(results(engine, requests), expected)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(("model", "dtype"), WITH_STATES)
def test_preemption_does_not_matter(model, dtype, prefix_cache, goldens, make_engine, results, alone):
    """Computing a preempted sequence again must not change a bit."""
    expected = alone(model, dtype)
    folder = goldens(model).folder
    engine = make_engine(folder, dtype, chunk=50, block_size=4, blocks=28, prefix_cache=prefix_cache)
    assert_same(results(engine, requests_of(goldens(model).prompts)), expected)
    assert engine.stats.preemptions > 5


@pytest.mark.parametrize(("model", "dtype"), CASES)
def test_repeating_a_prompt_does_not_matter(model, dtype, goldens, make_engine, results, alone):
    """With everything cached, one token of each prompt is computed in a copied block."""
    expected = alone(model, dtype)
    engine = make_engine(goldens(model).folder, dtype, block_size=1)
    requests = requests_of(goldens(model).prompts)
    results(engine, requests)
    copied, computed = engine.stats.copied_blocks, engine.stats.computed_tokens
    assert_same(results(engine, requests), expected)
    assert engine.stats.copied_blocks - copied == len(requests) * len(engine.runner.cache.num_blocks)
    assert engine.stats.computed_tokens - computed == len(requests) * NEW_TOKENS


@pytest.mark.parametrize(("model", "dtype"), CASES)
def test_going_on_from_anothers_completion_does_not_matter(model, dtype, goldens, make_engine, results):
    """The next turn of a conversation finds the prompt's K and V. Those of the answer have other bits: they were
    generated token by token."""
    folder, prompts = goldens(model).folder, goldens(model).prompts[:16]
    engine = make_engine(folder, dtype, block_size=4)
    first, _ = results(engine, requests_of(prompts))
    turns = [[*prompt, *first[i], 5, 6, 7] for i, prompt in enumerate(prompts)]
    requests = [structs.replace(r, id=r.id + 100) for r in requests_of(turns)]
    fresh = make_engine(folder, dtype, block_size=4, prefix_cache=False)
    expected = results(fresh, requests)
    computed = engine.stats.computed_tokens
    assert_same(results(engine, requests), expected)
    found = sum(len(prompt) // 4 * 4 for prompt in prompts)
    assert engine.stats.computed_tokens - computed == sum(len(turn) + NEW_TOKENS - 1 for turn in turns) - found


@pytest.mark.parametrize("dtype", DTYPES)
def test_recorded_logits_see_a_single_bit(dtype, goldens, make_engine, results):
    """The comparison above must fail if one weight changes in its last bit."""
    engine = make_engine(goldens("llama").folder, dtype, batch_invariant=False)
    requests = requests_of(goldens("llama").prompts[:4])
    expected = results(engine, requests)
    model = engine.runner.model
    with torch.inference_mode():
        model.norm[0] = torch.nextafter(model.norm[0], torch.tensor(9.0).to(model.norm))
    with pytest.raises(AssertionError):
        assert_same(results(engine, requests), expected)
