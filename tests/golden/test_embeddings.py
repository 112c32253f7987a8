"""Embeddings in fp32 equal transformers' hidden states, pooled, whatever the schedule was."""

import numpy as np
import pytest
import torch

from rosebatch.pooling_params import PoolingParams
from rosebatch.request import Request
from tests.golden.conftest import MODELS
from tests.golden.families import FAMILIES

POOLINGS = ("last", "mean")
FAST = ["gpt2", "llama", "mistral", "qwen3", "gemma3", "phi3-longrope", "gpt_oss", "qwen3_moe", "qwen3_next"]
OWN = [name for name in [*MODELS, *FAMILIES] if not name.startswith("hp1")]
CASES = [pytest.param(name, marks=() if name in FAST else pytest.mark.thorough) for name in OWN]
# Of vectors of length 1.
TOLERANCE = 1e-5


def prompts_of(golden):
    """Different lengths; some share a beginning, some fill whole blocks."""
    return golden.prompts[:24]


def requests_of(prompts, pooling, **params):
    own = PoolingParams(pooling=pooling, **params)
    return [Request(number, tuple(prompt), pooling=own) for number, prompt in enumerate(prompts)]


@pytest.fixture
def embed(run_engine):
    """The embeddings of prompts as ``[N, D]``."""

    def run(engine, prompts, pooling, **params):
        done = run_engine(engine, requests_of(prompts, pooling, **params))
        assert not any(completion.token_ids for completion in done.values())
        return np.array([done[number].embedding for number in range(len(prompts))], np.float32)

    return run


@pytest.fixture(scope="session")
def expected(transformers, goldens):
    """transformers' own hidden states of each prompt, pooled and normalised: ``[N, H]``."""
    made = {}

    def pooled(name, pooling):
        if name not in made:
            model = transformers.AutoModel.from_pretrained(goldens(name).folder, dtype=torch.float32).eval()
            with torch.inference_mode():
                made[name] = [
                    model(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long))
                    .last_hidden_state[0]
                    .double()
                    for prompt in prompts_of(goldens(name))
                ]
        vectors = torch.stack([states[-1] if pooling == "last" else states.mean(0) for states in made[name]])
        return torch.nn.functional.normalize(vectors, dim=1).numpy()

    return pooled


@pytest.mark.whole
@pytest.mark.parametrize("name", CASES)
def test_whole_chunked_and_from_the_prefix_cache(name, goldens, expected, make_engine, embed):
    """A state before the last norm, of another row, or a mean that leaves cached tokens out is another vector."""
    golden = goldens(name)
    prompts = prompts_of(golden)
    whole = make_engine(golden.folder, chunked_prefill=False, prefix_cache=False)
    chunked = make_engine(golden.folder, seqs=3, chunk=16, block_size=4, blocks=60)
    for pooling in POOLINGS:
        right = expected(name, pooling)
        for engine in (whole, chunked, chunked):
            np.testing.assert_allclose(embed(engine, prompts, pooling), right, rtol=0, atol=TOLERANCE)
