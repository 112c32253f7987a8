"""Encoders on a GPU: the vectors of the PyTorch runner on a CPU in fp32, and near them in bf16, for any batch."""

import numpy as np
import pytest
import torch

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.pooling_params import PoolingParams
from rosebatch.core.request import Request
from rosebatch.engine.load import load_engine
from rosebatch.model.source import find_model
from tests.helpers.encoders import prompts_of, save_encoder
from tests.helpers.families import ENCODERS

pytestmark = pytest.mark.gpu
POOLINGS = ("mean", "cls", "last")
# Of vectors of length 1, see ``test_embeddings_gpu.py``.
FP32_DISTANCE, BF16_DISTANCE = 1e-5, 0.1


def engine_on(device, folder, dtype, **limits):
    on = torch.device(device)
    config = RunConfig(model=str(folder), dtype=dtype, **limits)
    return load_engine(find_model(config, on), config, Switches.resolve({}, on.type), on).engine


def embed(engine, prompts, pooling):
    params = PoolingParams(pooling=pooling)
    requests = [Request(i, tuple(prompt), pooling=params) for i, prompt in enumerate(prompts)]
    done = {completion.request.id: completion.pooled for completion in engine.run(requests)}
    return np.array([done[i] for i in range(len(prompts))])


@pytest.fixture(scope="module", params=ENCODERS)
def case(request, tmp_path_factory):
    """A folder, its prompts, and the CPU's vectors by pooling."""
    folder, prompts = tmp_path_factory.mktemp(request.param), prompts_of(ENCODERS[request.param][1]["vocab_size"])
    save_encoder(request.param, folder)
    engine = engine_on("cpu", folder, "float32")
    return folder, prompts, {pooling: embed(engine, prompts, pooling) for pooling in POOLINGS}


@pytest.mark.parametrize("limits", [{}, {"max_num_seqs": 1}, {"max_num_seqs": 7, "max_num_batched_tokens": 50}])
def test_vectors_of_the_cpu(case, limits):
    """A row of a graph's padding, or of another prompt, in place of a prompt's own would be another vector."""
    folder, prompts, expected = case
    engine, narrow = (engine_on("cuda", folder, dtype, **limits) for dtype in ("float32", "bfloat16"))
    for pooling in POOLINGS:
        # The second time, graphs are replayed.
        for _ in range(2):
            found = embed(engine, prompts, pooling)
            np.testing.assert_allclose(found, expected[pooling], rtol=0, atol=FP32_DISTANCE)
        distances = np.linalg.norm(embed(narrow, prompts, pooling) - expected[pooling], axis=1)
        assert distances.max() < BF16_DISTANCE


def test_first_states_come_from_graphs(case):
    """Small steps would wait for Python, kernel by kernel."""
    folder, prompts, _ = case
    engine = engine_on("cuda", folder, "float32")
    for _ in range(3):
        embed(engine, prompts[:7], "cls")
    assert engine.stats.graph_replays > 0
