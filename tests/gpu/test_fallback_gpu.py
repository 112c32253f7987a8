"""On a GPU, greedy tokens of the transformers fallback in fp32 equal transformers' own, with kernels and graphs."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.cache.kv_cache import bytes_per_block
from rosebatch.engine.load import load_engine
from rosebatch.model.fallback.load import load_fallback
from rosebatch.model.source import find_model
from rosebatch.ops.select import select
from tests.helpers.tiny_families import reference, save_tiny_model, tiny_config

pytestmark = pytest.mark.gpu

NEW_TOKENS = 24
# Fused layers, soft caps and windows, sinks and experts, windows that only masks tell, learned positions, values that
# are narrower than keys.
FAMILIES = ["llama", "qwen3", "gemma2", "gpt_oss", "phimoe", "opt", "deepseek_v3"]
# In fp32 a product grouped by expert may wait for the host, so that there are no graphs.
DENSE = ["llama", "qwen3", "gemma2", "opt"]


@pytest.fixture(scope="module", params=FAMILIES)
def golden(
    request: pytest.FixtureRequest, transformers: Any, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path, list[list[int]], dict[int, list[int]]]:
    """A family, its folder, prompts, and transformers' tokens for those that rounding does not decide."""
    folder = tmp_path_factory.mktemp(request.param)
    model = save_tiny_model(tiny_config(request.param), folder)
    numbers = random.Random(0)
    shared = [numbers.randrange(5, 211) for _ in range(40)]
    prompts = [
        shared[: numbers.randrange(40)] + [numbers.randrange(5, 211) for _ in range(numbers.randrange(1, 50))]
        for _ in range(72)
    ]
    return request.param, folder, prompts, reference(model, prompts, NEW_TOKENS)


@pytest.mark.parametrize(("batch", "chunk", "blocks"), [(1, 8192, 0), (7, 8192, 0), (64, 50, 0), (64, 50, 14)])
def test_greedy_equals_transformers(golden: tuple, batch: int, chunk: int, blocks: int, device: torch.device) -> None:
    """The CPU's tests cannot see errors of device placement, kernels, and of buffers that a graph replays from."""
    family, folder, prompts, expected = golden
    source = find_model(str(folder), "auto", "float32", device, model_impl="transformers")
    memory = blocks * bytes_per_block(source.config.kv_planes, 16, torch.float32) or 1 << 28
    limits = RunConfig(max_num_seqs=batch, max_num_batched_tokens=chunk, block_size=16, kv_cache_memory=memory)
    engine = load_engine(source, limits, Switches.resolve({}, "cuda"), device).engine
    count = min(3 * batch, len(prompts))
    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    requests = [Request(i, tuple(prompt), sampling) for i, prompt in enumerate(prompts[:count])]
    found = {done.request.id: list(done.token_ids) for done in engine.run(requests)}
    assert {i: found[i] for i in expected if i < count} == {i: expected[i] for i in expected if i < count}
    assert engine.stats.preemptions > 0 or not blocks or all(source.config.kv_windows)
    assert engine.stats.graph_replays > 0 or family not in DENSE


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_steps_in_bf16_never_wait(family: str, transformers: Any, tmp_path: Path, device: torch.device) -> None:
    """A step that waits for the host cannot be a graph: it would run at half the speed."""
    save_tiny_model(tiny_config(family), tmp_path)
    source = find_model(str(tmp_path), "auto", "bfloat16", device, model_impl="transformers")
    ops = select(Switches.resolve({}, "cuda"), "cuda")
    model = load_fallback(source.hf_config, source.config, source.folder, ops, torch.bfloat16, device)
    assert model.waits is None
