"""Greedy tokens in fp32 equal transformers' own for every family that rosebatch has beside the first ones."""

import pytest

from tests.golden.families import FAMILIES, VARIANTS

CASES = [*FAMILIES, *(pytest.param(name, marks=pytest.mark.thorough) for name in VARIANTS)]


@pytest.mark.whole
@pytest.mark.parametrize("name", CASES)
def test_whole_prompts_and_chunks_with_few_seats(name, goldens, make_engine, greedy_tokens):
    """A wrong name, norm, multiplier, order or table changes tokens; so would one that the schedule can reach."""
    golden = goldens(name)
    engine = make_engine(golden.folder, chunked_prefill=False, prefix_cache=False)
    assert greedy_tokens(engine, golden.prompts) == golden.expected
    engine = make_engine(golden.folder, seqs=3, chunk=16, block_size=4, blocks=40)
    assert greedy_tokens(engine, golden.prompts[:16]) == golden.expected[:16]
    assert engine.stats.max_running == 3
