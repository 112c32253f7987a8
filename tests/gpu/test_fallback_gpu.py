"""On a GPU, greedy tokens of the transformers fallback in fp32 equal transformers' own, with kernels and graphs."""

import random

import pytest
import torch

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.model.fallback.load import load_fallback
from rosebatch.model.source import find_model
from rosebatch.ops.select import select
from tests.helpers.reference import clear, generate
from tests.helpers.running import greedy
from tests.helpers.tiny_families import engine_of_fallback, save_tiny_model, tiny_config

pytestmark = pytest.mark.gpu

NEW_TOKENS = 24
# Fused layers, soft caps and windows, sinks and experts, windows that only masks tell, learned positions, values that
# are narrower than keys.
FAMILIES = ["llama", "qwen3", "gemma2", "gpt_oss", "phimoe", "opt", "deepseek_v3"]
# In fp32 a product grouped by expert may wait for the host, so that there are no graphs.
DENSE = ["llama", "qwen3", "gemma2", "opt"]


@pytest.fixture(scope="module", params=FAMILIES)
def golden(request, transformers, tmp_path_factory):
    """A family, its folder, prompts, and transformers' tokens for those that rounding does not decide."""
    folder = tmp_path_factory.mktemp(request.param)
    model = save_tiny_model(tiny_config(request.param), folder)
    numbers = random.Random(0)
    shared = [numbers.randrange(5, 211) for _ in range(40)]
    prompts = [
        shared[: numbers.randrange(40)] + [numbers.randrange(5, 211) for _ in range(numbers.randrange(1, 50))]
        for _ in range(72)
    ]
    return request.param, folder, prompts, clear(*generate(model, prompts, NEW_TOKENS))


@pytest.mark.parametrize(("batch", "chunk", "blocks"), [(1, 8192, 0), (7, 8192, 0), (64, 50, 0), (64, 50, 14)])
def test_greedy_equals_transformers(golden, batch, chunk, blocks):
    """The CPU's tests cannot see errors of device placement, kernels, and of buffers that a graph replays from."""
    family, folder, prompts, expected = golden
    limits = {"max_num_seqs": batch, "max_num_batched_tokens": chunk, "blocks": blocks}
    engine = engine_of_fallback(folder, "cuda", **limits)
    count = min(3 * batch, len(prompts))
    found = greedy(engine, prompts[:count], NEW_TOKENS)
    assert {i: found[i] for i in expected if i < count} == {i: expected[i] for i in expected if i < count}
    assert engine.stats.preemptions > 0 or not blocks or all(spec.window for spec in engine.runner.model.mixers)
    assert engine.stats.graph_replays > 0 or family not in DENSE


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_steps_in_bf16_never_wait(family, transformers, tmp_path, device):
    """A step that waits for the host cannot be a graph: it would run at half the speed."""
    save_tiny_model(tiny_config(family), tmp_path)
    source = find_model(RunConfig(model=str(tmp_path), dtype="bfloat16", model_impl="transformers"), device)
    ops = select(Switches.resolve({}, "cuda"), "cuda")
    model = load_fallback(source.hf_config, source.config, source.folder, ops, torch.bfloat16, device)
    assert model.waits is None
