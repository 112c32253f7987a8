"""On a GPU equal requests give equal tokens: in another engine, in the same engine again, and without graphs.

Equality is exact in 16 bits too, because equal launches add numbers in the same order. Only for another batch, whose
products are cut into other tiles, do the tests use fp32, where rounding does not show.
"""

import dataclasses
import random

import pytest
import torch
from msgspec import structs

from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams

pytestmark = pytest.mark.gpu

FAMILIES = ["GPT2", "Qwen3", "HP1"]
DTYPES = [torch.float16, torch.bfloat16]
NEW_TOKENS = 24
KINDS = [
    {},
    {"temperature": 0.9},
    {"temperature": 1.0, "top_k": 20},
    {"temperature": 0.8, "top_p": 0.9},
    {"temperature": 1.2, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
]


@pytest.fixture(scope="module")
def requests():
    """64 with different lengths and limits, some with a common beginning, greedy and all kinds of sampling."""
    numbers = random.Random(0)
    shared = [numbers.randrange(199) for _ in range(90)]
    made = []
    for index in range(64):
        prompt = shared[: numbers.choice([0, 20, 64])] + [numbers.randrange(199) for _ in range(numbers.randint(1, 60))]
        sampling = SamplingParams(
            max_tokens=NEW_TOKENS - index % 7, seed=numbers.randrange(2**64), ignore_eos=True, **KINDS[index % 5]
        )
        made.append(Request(index, tuple(prompt), sampling))
    return made


def run(engine, requests):
    """Request id -> tokens."""
    return {completion.request.id: completion.token_ids for completion in engine.run(requests)}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_another_engine_gives_the_same(family, dtype, requests, make_engine):
    """Uninitialized memory and races give different tokens in another engine."""
    first = run(make_engine(family, dtype, seqs=64), requests)
    assert [len(first[r.id]) for r in requests] == [r.sampling.max_tokens for r in requests]
    for _ in range(2):
        assert run(make_engine(family, dtype, seqs=64), requests) == first


@pytest.mark.parametrize("seqs", [7, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_the_same_engine_gives_the_same_again(family, dtype, seqs, requests, make_engine):
    """Nothing that a run leaves in slots, blocks or graphs may change the next run.

    Without the prefix cache: with it the second run would compute less, in other products.
    """
    engine = make_engine(family, dtype, {"prefix_cache": False}, seqs=seqs)
    first = run(engine, requests)
    for _ in range(2):
        assert run(engine, requests) == first


@pytest.mark.parametrize("batch", [1, 7, 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_graphs_on_equal_graphs_off(family, dtype, batch, requests, make_engine):
    """A value frozen into a graph at capture would change the tokens.

    The second run replays graphs from its first step on, in other slots and blocks.
    """
    chosen = requests[: max(10, batch)]
    with_graphs, without = (make_engine(family, dtype, {"cuda_graph": on}, seqs=batch) for on in (True, False))
    for order in (chosen, chosen[::-1]):
        assert run(with_graphs, order) == run(without, order)
    assert with_graphs.stats.graph_replays > 0
    assert without.stats.graph_replays == 0


@pytest.mark.parametrize("seqs", [7, 64])
@pytest.mark.parametrize("family", ["GPT2", "Llama", "Qwen3", "HP1"])
def test_the_place_in_the_batch_does_not_matter(family, seqs, requests, make_engine):
    """In fp32 a sampled completion depends on its own request alone."""
    forwards = run(make_engine(family, torch.float32, seqs=seqs), requests)
    assert run(make_engine(family, torch.float32, seqs=seqs), requests[::-1]) == forwards


def test_another_seed_gives_another_completion(requests, make_engine):
    """If seeds had no effect, the tests above would compare greedy tokens."""
    engine = make_engine("Qwen3", torch.float32, seqs=64)
    first = run(engine, requests)
    seeds = [dataclasses.replace(r.sampling, seed=r.sampling.seed ^ 1) for r in requests]
    others = run(engine, [structs.replace(r, sampling=s) for r, s in zip(requests, seeds, strict=True)])
    changed = [r.id for r in requests if first[r.id] != others[r.id]]
    assert changed == [r.id for r in requests if not r.sampling.greedy]
