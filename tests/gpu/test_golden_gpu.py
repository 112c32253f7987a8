"""On a GPU: greedy tokens equal transformers' own in fp32, whatever the batch, the chunks and the cache's size."""

import random
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from rosebatch.config import EngineConfig
from rosebatch.engine.kv_cache import bytes_per_block
from rosebatch.engine.load import load_engine
from rosebatch.engine.stats import EngineStats
from rosebatch.model.source import find_model
from rosebatch.request import Request, SamplingParams
from rosebatch.toggles import Toggles

pytestmark = pytest.mark.gpu

SIZES = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
}
GPT2_SIZES = {"vocab_size": 199, "n_embd": 48, "n_layer": 3, "n_head": 4, "n_positions": 256, "initializer_range": 0.2}
FAMILIES = {
    "GPT2": GPT2_SIZES,
    "Llama": SIZES,
    "Mistral": {**SIZES, "sliding_window": 7},
    "Qwen2": SIZES,
    "Qwen3": {**SIZES, "head_dim": 24},
}
NEW_TOKENS = 16


@pytest.fixture(scope="module", params=FAMILIES)
def golden(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """A model folder, prompts, and what transformers generates for each of them."""
    import transformers

    config = getattr(transformers, f"{request.param}Config")(**FAMILIES[request.param], eos_token_id=None)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().cuda()
    folder = tmp_path_factory.mktemp(request.param)
    model.save_pretrained(folder)
    numbers = random.Random(0)
    shared = [numbers.randrange(config.vocab_size) for _ in range(40)]
    prompts = [
        shared[: numbers.randrange(1, 40)]
        + [numbers.randrange(config.vocab_size) for _ in range(numbers.randrange(1, 60))]
        for _ in range(256)
    ]
    expected = []
    by_length: dict[int, list[int]] = {}
    for index, prompt in enumerate(prompts):
        by_length.setdefault(len(prompt), []).append(index)
    found: dict[int, list[int]] = {}
    for length, members in by_length.items():
        ids = torch.tensor([prompts[index] for index in members], device="cuda")
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW_TOKENS, do_sample=False)
        found |= dict(zip(members, out[:, length:].tolist(), strict=True))
    expected = [found[index] for index in range(len(prompts))]
    return folder, prompts, expected


def generate(
    folder: Path, prompts: list, switches: dict[str, bool] | None = None, **limits: int
) -> tuple[dict[int, list[int]], EngineStats]:
    """Request index -> tokens."""
    device = torch.device("cuda")
    source = find_model(str(folder), "auto", "float32", device)
    engine = load_engine(source, EngineConfig(**limits), Toggles.resolve(switches or {}, "cuda"), device).engine
    sampling = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    requests = [Request(index=i, prompt_token_ids=tuple(p), sampling=sampling) for i, p in enumerate(prompts)]
    return {c.request.index: list(c.token_ids) for c in engine.run(requests)}, engine.stats


@pytest.mark.parametrize("batch", [1, 7, 64, 256])
@pytest.mark.parametrize(("chunk", "blocks"), [(8192, 0), (50, 0), (50, 14)])
def test_greedy_equals_transformers(golden: tuple[Path, list, list], batch: int, chunk: int, blocks: int) -> None:
    """Guards device placement, dtype and indexing bugs that the CPU's tests cannot see."""
    folder, prompts, expected = golden
    config = find_model(str(folder), "auto", "float32", torch.device("cuda")).config
    memory = blocks * bytes_per_block(config, 16, torch.float32) or 1 << 28
    limits = {"max_num_batched_tokens": chunk, "max_num_seqs": batch, "block_size": 16, "kv_cache_memory": memory}
    count = min(2 * batch, len(prompts))
    got, stats = generate(folder, prompts[:count], **limits)
    assert got == dict(enumerate(expected[:count]))
    assert stats.preemptions > 0 or not (blocks and batch >= 64)


@pytest.mark.parametrize("name", [f.name for f in fields(Toggles) if "cuda" in f.metadata["devices"]])
def test_every_switch_on_equals_off(golden: tuple[Path, list, list], name: str) -> None:
    """A switch may change the speed and nothing else."""
    folder, prompts, expected = golden
    got, stats = generate(folder, prompts[:100], {name: False}, max_num_seqs=64, kv_cache_memory=1 << 28)
    assert got == dict(enumerate(expected[:100]))
    assert (stats.graph_replays > 0) == (name not in ("cuda_graph", "paged_attention"))
