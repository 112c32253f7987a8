"""Embeddings on a GPU: those of the PyTorch runner on a CPU in fp32, and near them in bf16, for any batch and chunk."""

import random

import numpy as np
import pytest
import torch

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.pooling_params import PoolingParams
from rosebatch.core.request import Request
from rosebatch.engine.load import load_engine
from rosebatch.model.source import find_model

pytestmark = pytest.mark.gpu

# Of vectors of length 1: the greatest distance of a number in fp32, and of whole vectors in bf16, whose last bit of a
# state is 2^-8 of it. A row that finds another expert as good as its own may be further away: at most one in 20.
FP32_DISTANCE, BF16_DISTANCE = 1e-5, 0.1
POOLINGS = ("last", "mean", "max")
NAMES = ["GPT2", "Llama", "Mistral", "Qwen3", "HP1", "gpt_oss calm", "qwen3_next calm", "lfm2 calm", "falcon_h1 calm"]


@pytest.fixture(scope="module", params=NAMES)
def name(request):
    return request.param


@pytest.fixture(scope="module")
def prompts(name, model_config):
    """Different lengths. Some share a beginning, and some are equal."""
    vocab, numbers = model_config(name).vocab_size, random.Random(0)
    shared = [numbers.randrange(vocab) for _ in range(40)]
    return [
        shared[: numbers.randrange(1, 40)] + [numbers.randrange(vocab) for _ in range(numbers.randrange(60))]
        for _ in range(126)
    ] + [shared] * 2


def embed(engine, prompts, pooling):
    params = PoolingParams(pooling=pooling)
    requests = [Request(i, tuple(prompt), pooling=params) for i, prompt in enumerate(prompts)]
    done = {completion.request.id: completion.pooled for completion in engine.run(requests)}
    return np.array([done[i] for i in range(len(prompts))])


@pytest.fixture(scope="module")
def expected(name, prompts, saved_model):
    """The PyTorch runner's on a CPU in fp32, by pooling."""
    device = torch.device("cpu")
    source = find_model(RunConfig(model=str(saved_model(name)), dtype="float32"), device)
    engine = load_engine(source, RunConfig(kv_cache_memory=1 << 26), Switches.resolve({}, "cpu"), device).engine
    return {pooling: embed(engine, prompts, pooling) for pooling in POOLINGS}


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("batch", [1, 7, 64])
@pytest.mark.parametrize("chunk", [8192, 50])
def test_vectors_of_the_cpu(name, prompts, expected, make_engine, pooling, batch, chunk):
    """A row of a graph's padding, or of the step before, in place of a prompt's own would be another vector."""
    count = min(2 * batch, len(prompts))
    engine = make_engine(name, torch.float32, seqs=batch, max_num_batched_tokens=chunk)
    # The second time, graphs are replayed, and prompts come from the prefix cache.
    for _ in range(2):
        found = embed(engine, prompts[:count], pooling)
        np.testing.assert_allclose(found, expected[pooling][:count], rtol=0, atol=FP32_DISTANCE)
    engine = make_engine(name, torch.bfloat16, seqs=batch, max_num_batched_tokens=chunk)
    distances = np.linalg.norm(embed(engine, prompts[:count], pooling) - expected[pooling][:count], axis=1)
    others = max(1, count // 20) if name.endswith("calm") else 0
    assert np.count_nonzero(distances >= BF16_DISTANCE) <= others


def test_last_states_come_from_graphs(prompts, make_engine):
    """Small steps would wait for Python, kernel by kernel."""
    engine = make_engine("Llama", torch.float32, seqs=7)
    for _ in range(3):
        embed(engine, prompts[:7], "last")
    assert engine.stats.graph_replays > 0
