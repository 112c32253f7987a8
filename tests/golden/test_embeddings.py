"""Embeddings in fp32 equal transformers' hidden states, pooled, whatever the schedule was."""

import functools
import math
from itertools import product

import numpy as np
import pytest
import torch

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.pooling_params import PoolingParams
from rosebatch.core.request import Request
from rosebatch.engine.load import load_engine
from rosebatch.model.source import find_model
from tests.helpers.families import FAMILIES, MODELS
from tests.helpers.running import run
from tests.helpers.threads_group import make_tensor_parallel_engine
from tests.helpers.variants import with_all_pairs

POOLED = {
    "last": lambda states: states[-1],
    "mean": lambda states: states.mean(0),
    "max": lambda states: states.amax(0),
}
POOLINGS = tuple(POOLED)
FAST = ["gpt2", "qwen3", "gemma3"]
CPU = torch.device("cpu")
OWN = [name for name in [*MODELS, *FAMILIES] if not name.startswith("hp1")]
CASES = [pytest.param(name, marks=() if name in FAST else pytest.mark.thorough) for name in OWN]
# Of vectors of length 1.
TOLERANCE = 1e-5


def prompts_of(golden):
    """Different lengths; some share a beginning, some fill whole blocks."""
    return golden.prompts[:8]


def requests_of(prompts, pooling, **params):
    own = PoolingParams(pooling=pooling, **params)
    return [Request(number, tuple(prompt), pooling=own) for number, prompt in enumerate(prompts)]


def embed(engine, prompts, pooling, **params):
    """The embeddings of prompts as ``[N, D]``."""
    done = run(engine, requests_of(prompts, pooling, **params))
    assert not any(completion.token_ids for completion in done.values())
    return np.array([done[number].pooled for number in range(len(prompts))], np.float32)


@pytest.fixture(scope="session")
def expected(transformers, goldens):
    """transformers' own hidden states of each prompt in fp64, pooled and normalised: ``[N, H]``.

    NaN where its own fp32 is half of the tolerance away: other instructions round such a prompt across it.
    """

    @functools.cache
    def states(name, dtype):
        own = {"dtype": dtype, "experts_implementation": "eager"}
        model = transformers.AutoModel.from_pretrained(goldens(name).folder, **own).eval()
        with torch.inference_mode():
            return [
                model(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long))
                .last_hidden_state[0]
                .double()
                for prompt in prompts_of(goldens(name))
            ]

    def pooled(name, pooling):
        exact, rounded = (
            torch.nn.functional.normalize(torch.stack([POOLED[pooling](each) for each in states(name, dtype)]))
            for dtype in (torch.float64, torch.float32)
        )
        unsure = (exact - rounded).abs().amax(1) > TOLERANCE / 2
        assert unsure.sum() <= 2, "too many prompts are decided by rounding"
        return exact.masked_fill(unsure[:, None], math.nan).numpy()

    return pooled


def require_close(found, right):
    """The rows that rounding does not decide are equal."""
    sure = ~np.isnan(right).any(1)
    np.testing.assert_allclose(found[sure], right[sure], rtol=0, atol=TOLERANCE)


@pytest.mark.whole
@pytest.mark.parametrize("name", CASES)
def test_whole_chunked_and_from_the_prefix_cache(name, goldens, expected, make_engine):
    """A state before the last norm, of another row, or a mean that leaves cached tokens out is another vector."""
    golden = goldens(name)
    prompts = prompts_of(golden)
    whole = make_engine(golden.folder, chunked_prefill=False, prefix_cache=False)
    chunked = make_engine(golden.folder, seqs=3, chunk=16, block_size=4, blocks=60)
    for pooling in POOLINGS:
        right = expected(name, pooling)
        # A mean takes nothing from the prefix cache: a second run would be the first.
        for engine in (whole, chunked, chunked)[: 3 if pooling == "last" else 2]:
            require_close(embed(engine, prompts, pooling), right)


@pytest.fixture
def threads(request):
    """A loop that is divided among threads has more ends, where PyTorch may compute by other instructions."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


DTYPES = ["float32", *(["bfloat16"] if torch.ops.mkldnn._is_mkldnn_bf16_supported() else [])]
RUNS = [
    {"name": name, "pooling": pooling, "dtype": dtype, "threads": threads}
    for name, pooling, dtype, threads in product(("llama", "mixtral", "gpt2"), POOLINGS, DTYPES, (1, 2))
]


@pytest.mark.parametrize(
    tuple(RUNS[0]), [tuple(RUNS[number].values()) for number in sorted(with_all_pairs(RUNS))], indirect=["threads"]
)
def test_no_bit_depends_on_the_schedule(name, dtype, pooling, goldens, make_engine, threads):
    """A resumed run computes rows in other batches and chunks: its bytes must be those of a run without a break."""
    golden = goldens(name)
    alone = make_engine(golden.folder, dtype, seqs=1, chunked_prefill=False, prefix_cache=False)
    prompts = golden.prompts[:32]
    expected = embed(alone, prompts, pooling)
    small = {"chunk": 50, "block_size": 4, "blocks": 40}
    for limits in ({}, {"chunk": 7, "block_size": 5}, small, {"seqs": 20, "prefix_cache": False}):
        found = embed(make_engine(golden.folder, dtype, **limits), prompts[::-1], pooling)[::-1]
        assert found.tobytes() == expected.tobytes(), limits


@pytest.mark.parametrize("name", ["llama", "gpt_oss", pytest.param("qwen3_next", marks=pytest.mark.thorough)])
def test_two_ranks(name, goldens, expected):
    """Hidden states are whole on rank 0; a part of one, or a sum that another rank keeps, would be another vector."""
    golden = goldens(name)
    source = find_model(RunConfig(model=str(golden.folder), dtype="float32"), CPU)
    limits = RunConfig(max_num_seqs=6, max_num_batched_tokens=24, kv_cache_memory=8 << 20, tensor_parallel_size=2)
    engine = make_tensor_parallel_engine(source, limits, Switches.resolve({}, "cpu"), 2)
    for pooling in POOLINGS:
        found = embed(engine, prompts_of(golden), pooling)
        require_close(found, expected(name, pooling))


@pytest.mark.parametrize("name", ["gpt2", "gemma3", pytest.param("gpt_oss", marks=pytest.mark.thorough)])
def test_models_of_transformers_code(name, goldens, expected):
    """The fallback's layers hand out several tensors; the wrong one would be another vector."""
    golden = goldens(name)
    source = find_model(RunConfig(model=str(golden.folder), dtype="float32", model_impl="transformers"), CPU)
    assert source.model_impl == "transformers"
    limits = RunConfig(max_num_seqs=6, max_num_batched_tokens=24, kv_cache_memory=8 << 20)
    engine = load_engine(source, limits, Switches.resolve({}, "cpu"), CPU).engine
    for pooling in POOLINGS:
        found = embed(engine, prompts_of(golden), pooling)
        require_close(found, expected(name, pooling))


def test_a_mean_takes_no_cached_tokens(goldens, make_engine):
    """The last token's state may; else documents with the same beginning are computed whole each time."""
    golden = goldens("llama")
    prompts = [golden.prompts[7]] * 2
    for pooling, hits in (("last", True), ("mean", False), ("max", False)):
        engine = make_engine(golden.folder, block_size=4)
        run(engine, requests_of(prompts[:1], pooling))
        done = run(engine, requests_of(prompts, pooling))
        assert all((completion.cached_tokens > 0) == hits for completion in done.values())


def test_dimensions_and_length(goldens, expected, make_engine):
    """A vector that is normalised before it is cut is too short for its users."""
    golden = goldens("qwen3")
    prompts, whole = prompts_of(golden), expected("qwen3", "last")
    engine = make_engine(golden.folder)
    cut = embed(engine, prompts, "last", dimensions=5)
    require_close(cut, whole[:, :5] / np.linalg.norm(whole[:, :5], axis=1)[:, None])
    plain = embed(engine, prompts, "last", normalize=False)
    lengths = np.linalg.norm(plain, axis=1)
    require_close(plain / lengths[:, None], whole)
    assert not np.isclose(lengths, 1).any()
