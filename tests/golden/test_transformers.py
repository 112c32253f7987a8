"""Greedy tokens in fp32 equal transformers' own, for every architecture and every way to schedule the work.

transformers does not have HP1, so HP1 is compared with ``PlainHP1``.
"""

import pytest

from tests.golden.conftest import NEW_TOKENS

MODELS = [
    "gpt2",
    "gpt2-options",
    "llama",
    "llama3-rope-biases-tied",
    "llama-linear-rope",
    "mistral",
    "qwen2",
    "qwen2-window",
    "qwen3",
    "hp1-options",
]


def assert_equals_reference(golden, count, engine, greedy_tokens):
    assert greedy_tokens(engine, golden.prompts[:count]) == golden.expected[:count]


def assert_too_small(engine, count):
    """The KV cache made rows start over. Where every layer has a window, blocks come back, and rows only wait."""
    if engine.scheduler.pool.window:
        assert engine.stats.max_running < count
    else:
        assert engine.stats.preemptions > 0


@pytest.mark.parametrize("name", MODELS)
def test_whole_prompts_in_one_batch(name, goldens, make_engine, greedy_tokens):
    """The plainest schedule: an error here is the model's, not the scheduler's."""
    engine = make_engine(goldens(name).folder, chunked_prefill=False, prefix_cache=False)
    assert_equals_reference(goldens(name), 64, engine, greedy_tokens)
    assert engine.stats.max_running == 64
    assert engine.stats.steps == NEW_TOKENS


@pytest.mark.parametrize("name", MODELS)
def test_whole_prompts_with_shared_prefixes(name, goldens, make_engine, greedy_tokens):
    """The second run reads shared blocks, and copies of blocks that are cached to their end."""
    engine = make_engine(goldens(name).folder)
    assert_equals_reference(goldens(name), 64, engine, greedy_tokens)
    assert_equals_reference(goldens(name), 64, engine, greedy_tokens)
    assert engine.stats.copied_blocks > 0
    prompt_tokens = sum(len(prompt) for prompt in goldens(name).prompts)
    assert engine.stats.computed_tokens < 1.5 * prompt_tokens + 2 * 64 * NEW_TOKENS


@pytest.mark.parametrize("name", MODELS)
def test_chunks_of_16_in_a_cache_that_is_too_small(name, goldens, make_engine, greedy_tokens):
    """Chunks, shared blocks and preemptions together must not change a token."""
    engine = make_engine(goldens(name).folder, chunk=16, block_size=4, blocks=28)
    assert_equals_reference(goldens(name), 32, engine, greedy_tokens)
    assert_too_small(engine, 32)


@pytest.mark.parametrize("name", MODELS)
def test_chunks_of_3_without_prefix_cache_in_a_cache_that_is_too_small(name, goldens, make_engine, greedy_tokens):
    """Preempted sequences must be computed again from their own tokens."""
    engine = make_engine(goldens(name).folder, chunk=3, block_size=2, blocks=57, prefix_cache=False)
    assert_equals_reference(goldens(name), 16, engine, greedy_tokens)
    assert_too_small(engine, 16)


@pytest.mark.parametrize("name", MODELS)
def test_whole_prompts_in_a_cache_that_is_too_small(name, goldens, make_engine, greedy_tokens):
    """Preemptions without chunks must not change a token."""
    engine = make_engine(goldens(name).folder, block_size=4, blocks=40, prefix_cache=False, chunked_prefill=False)
    assert_equals_reference(goldens(name), 32, engine, greedy_tokens)
    assert_too_small(engine, 32)


@pytest.mark.parametrize("name", MODELS)
def test_single_tokens(name, goldens, make_engine, greedy_tokens):
    """Prompts are computed token by token, in blocks of one token."""
    engine = make_engine(goldens(name).folder, chunk=1, block_size=1)
    assert_equals_reference(goldens(name), 6, engine, greedy_tokens)


@pytest.mark.parametrize("chunk", [3, 16, 8192])
@pytest.mark.parametrize("name", MODELS)
def test_batch_of_one(name, chunk, goldens, make_engine, greedy_tokens):
    """No neighbour may be needed: one sequence at a time, whole and in chunks."""
    engine = make_engine(goldens(name).folder, seqs=1, chunk=chunk)
    assert_equals_reference(goldens(name), 6, engine, greedy_tokens)
    assert engine.stats.max_running == 1
