"""On a GPU, changes of logits and reports about them equal those of plain PyTorch; in fp32 the tokens are equal."""

import random
from functools import partial

import pytest
import torch

from rosebatch.config.switches import hidden_by
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.core.structured_outputs import GrammarSpec
from rosebatch.engine.cache.kv_cache import bytes_per_block
from tests.engine.constraint import EveryThird

pytestmark = pytest.mark.gpu

VOCAB = 199
KINDS = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "logprobs": 3},
    {},
    {"logit_bias": ((17, 4.0), (40, -9.0)), "temperature": 0.9, "n": 2},
    {"min_tokens": 20, "stop_token_ids": tuple(range(0, VOCAB, 4))},
    {"grammar": GrammarSpec("json_object"), "logprobs": 0},
    {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "frequency_penalty": 1.5, "n": 3},
    {"prompt_logprobs": 2, "logprobs": 5},
    {"grammar": GrammarSpec("json_object"), "temperature": 0.8, "repetition_penalty": 1.2, "n": 2},
    {"stop_token_ids": (7, 30, 55)},
]


@pytest.fixture(scope="module")
def requests():
    """80 with different lengths and limits, some with a common beginning."""
    numbers = random.Random(0)
    shared = [numbers.randrange(VOCAB) for _ in range(90)]
    made = []
    for index in range(80):
        prompt = shared[: numbers.choice([0, 20, 64])] + [
            numbers.randrange(VOCAB) for _ in range(numbers.randint(1, 60))
        ]
        limits = {"max_tokens": 36 - index % 7, "seed": numbers.randrange(2**64)}
        sampling = SamplingParams(**limits, **KINDS[index % len(KINDS)])
        made.append(Request(index, tuple(prompt), sampling))
    return made


def run(engine, requests):
    """Request id and sample -> completion."""
    for request in requests:
        engine.add(request, constraint=partial(EveryThird, VOCAB) if request.sampling.grammar else None)
    done = {}
    while engine.has_unfinished:
        done |= {(c.request.id, c.sample): c for c in engine.step()}
    engine.scheduler.check_integrity()
    assert engine.scheduler.blocks.num_used == 0
    return done


def assert_same(actual, expected):
    """Compares tokens and reasons exactly, log-probabilities up to the rounding of fp32 sums in another order."""
    assert actual.keys() == expected.keys()
    for key, completion in actual.items():
        other = expected[key]
        assert (completion.token_ids, completion.finish_reason) == (other.token_ids, other.finish_reason), key
        for name in ("logprobs", "prompt_logprobs"):
            ours, theirs = getattr(completion, name), getattr(other, name)
            assert [(t.token_id, [i for i, _ in t.top]) for t in ours] == [
                (t.token_id, [i for i, _ in t.top]) for t in theirs
            ]
            values = [[v for t in side for v in (t.logprob, *(p for _, p in t.top))] for side in (ours, theirs)]
            assert values[0] == pytest.approx(values[1], abs=1e-3)


@pytest.mark.parametrize("blocks", [0, 24])
@pytest.mark.parametrize("seqs", [3, 64])
@pytest.mark.parametrize("family", ["GPT2", "Qwen3"])
def test_equal_to_plain_pytorch(family, seqs, blocks, requests, make_engine, model_config):
    """Graphs of every kind of step, rows that move, and a cache that is too small must not change a token."""
    expected = run(make_engine(family, torch.float32, {"paged_attention": False}, seqs=64), requests)
    memory = blocks * bytes_per_block(model_config(family).kv_planes, 16, torch.float32) or 1 << 28
    engine = make_engine(family, torch.float32, seqs=seqs, block_size=16, kv_cache_memory=memory)
    assert_same(run(engine, requests), expected)
    assert_same(run(engine, requests[::-1]), expected)
    assert engine.stats.graph_replays > 0
    assert engine.stats.preemptions > 0 or not (blocks and seqs == 64)


@pytest.mark.parametrize(
    "switch", ["fused_sampler", "batched_sampling", "late_results", "cuda_graph", "batched_rollover", "prefix_cache"]
)
def test_switches(switch, requests, make_engine):
    """Each switch changes where tokens are sampled, when results arrive, or who writes a step's inputs."""
    expected = run(make_engine("Qwen3", torch.float32, seqs=64), requests)
    off = dict.fromkeys([switch, *hidden_by(switch, "cuda")], False)
    assert_same(run(make_engine("Qwen3", torch.float32, off, seqs=64), requests), expected)
