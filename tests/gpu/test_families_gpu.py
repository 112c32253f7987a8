"""On a GPU, greedy tokens in fp32 of every family equal transformers' own, in graphs and with preemptions."""

import random

import pytest
import torch

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.errors import FlagError
from rosebatch.launch.launch import launch
from rosebatch.model.source import find_model
from rosebatch.ops.shard import require_divisible
from tests.helpers.families import FAMILIES
from tests.helpers.reference import clear
from tests.helpers.running import greedy
from tests.helpers.threads_group import make_tensor_parallel_engine

pytestmark = pytest.mark.gpu

NEW_TOKENS = 24
# A token with a smaller margin may differ by rounding alone: such prompts are left out.
MARGIN = 2e-3


@pytest.fixture(scope="module", params=FAMILIES)
def golden(request, model_config, reference):
    """A family, prompts, and transformers' tokens for each of them."""
    vocab, numbers = model_config(request.param).vocab_size, random.Random(0)
    shared = [numbers.randrange(vocab) for _ in range(60)]
    lengths = (1, 2, 9, 24, 33, 64, 100)
    prompts = []
    for i in range(190):
        length = lengths[i % len(lengths)]
        common = numbers.randint(0, min(length, 60))
        prompts.append(shared[:common] + [numbers.randrange(vocab) for _ in range(length - common)])
    tokens, logits = reference(request.param, torch.float32, prompts, NEW_TOKENS)
    kept = clear(tokens, logits, MARGIN)
    assert len(kept) >= 128, "too many prompts are decided by rounding"
    return request.param, [prompts[i] for i in kept], list(kept.values())


@pytest.mark.parametrize(("batch", "chunk", "blocks"), [(1, 8192, 0), (7, 50, 0), (64, 8192, 0), (64, 50, 14)])
def test_greedy_equals_transformers(golden, batch, chunk, blocks, model_config, make_engine):
    """The interpreter cannot see errors of graphs, of compiled kernels and of a GPU's order of events."""
    family, prompts, expected = golden
    limits = {"max_num_batched_tokens": chunk, "blocks": blocks}
    engine = make_engine(family, torch.float32, seqs=batch, **limits)
    count = min(2 * batch, len(prompts))
    assert greedy(engine, prompts[:count], NEW_TOKENS) == expected[:count]
    # Where all layers have a window, sequences stop growing, and seldom run short.
    assert engine.stats.preemptions > 0 or not blocks or all(model_config(family).kv_windows)
    assert engine.stats.graph_replays > 0


@pytest.mark.parametrize("name", ["fused_norm", "fused_mlp", "fused_rotary", "fused_qk_norm", "cuda_graph"])
def test_switches_of_the_layers_on_equal_off(golden, name, make_engine):
    """A family's kernels, and what takes their place, give the same tokens."""
    family, prompts, expected = golden
    engine = make_engine(family, torch.float32, {name: False}, seqs=64)
    assert greedy(engine, prompts[:64], NEW_TOKENS) == expected[:64]


def test_bf16_runs_close_to_transformers(golden, reference, make_engine):
    """The kernels for 16 bits have forms of their own: a wrong one changes first tokens, rounding only a few."""
    family, prompts, _ = golden
    expected, _ = reference(family, torch.bfloat16, prompts[:64], 1)
    tokens = greedy(make_engine(family, torch.bfloat16, seqs=64), prompts[:64], 1)
    assert sum(a == b for a, b in zip(tokens, expected, strict=True)) >= 54


def test_two_ranks_on_one_gpu(golden, saved_model, device):
    """Kernels get odd shapes of a half model; the ranks are threads, which no graph can be captured over."""
    family, prompts, expected = golden
    source = find_model(RunConfig(model=str(saved_model(family)), dtype="float32"), device)
    limits = RunConfig(max_num_seqs=7, kv_cache_memory=1 << 27, tensor_parallel_size=2)
    engine = make_tensor_parallel_engine(source, limits, Switches.resolve({"cuda_graph": False}, "cuda"), 2, device)
    assert greedy(engine, prompts[:28], NEW_TOKENS) == expected[:28]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_on_gpus_of_their_own(ranks, golden, saved_model):
    """Sums over ranks are inside of the graphs, and every rank samples the same tokens."""
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    family, prompts, expected = golden
    if ranks == 4:
        source = find_model(RunConfig(model=str(saved_model(family)), dtype="float32"), torch.device("cuda"))
        try:
            require_divisible(source.config, ranks)
        except FlagError as error:
            pytest.skip(str(error))
    config = RunConfig(
        model=str(saved_model(family)),
        dtype="float32",
        device="cuda",
        max_num_seqs=64,
        kv_cache_memory=1 << 27,
        tensor_parallel_size=ranks,
    )
    engine = launch(config).engine
    assert greedy(engine, prompts, NEW_TOKENS) == expected
    assert engine.stats.graph_replays > 0
