"""On a GPU: K and V in 8 bits inside graphs, as on a CPU."""

from dataclasses import fields

import pytest
import torch

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches, is_on
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.engine.build import LoadedModel, build_engine
from rosebatch.engine.cache.kv_cache import bytes_per_block
from rosebatch.engine.triton_runner import prefix_groups, prefix_tiles
from rosebatch.ops.select import select
from tests.engine.small_models import MODELS, VOCAB, build, plain_engine
from tests.helpers.running import greedy
from tests.helpers.tiny_engines import engine_of

pytestmark = pytest.mark.gpu

_SAMPLING = SamplingParams(max_tokens=20, ignore_eos=True)
_PROMPTS = [tuple((7 * i * i + 3 * i + length) % VOCAB for i in range(length)) for length in (1, 2, 5, 9, 13, 17, 19)]
# Of one beginning: rows share keys, chunks a tile.
_LONG = [(*((5 * i * i + i) % 90 for i in range(200)), row, 7, row) for row in range(40)]


@pytest.fixture(autouse=True)
def short_prefixes_are_shared(monkeypatch):
    for module in (prefix_groups, prefix_tiles):
        monkeypatch.setattr(module, "MIN_KEYS", 64)


def _requests():
    return [Request(index, prompt, _SAMPLING) for index, prompt in enumerate(_PROMPTS)]


@pytest.mark.parametrize("off", [(), ("fused_qk_norm",), ("fused_kv_append",), ("fused_rotary",), ("split_keys",)])
@pytest.mark.parametrize(("slots", "blocks"), [(1, 40), (7, 40), (7, 4)])
def test_tokens_equal_a_cpus(slots, blocks, off, device):
    """fp32 beside e4m3: a graph's padding rows, and rows that come back from a preemption, must not show."""
    switches = Switches(**{f.name: is_on(f, "cuda") and f.name not in off for f in fields(Switches)})
    ops = select(switches, "cuda")
    model = build("e4m3", ops, device)
    size = bytes_per_block([spec.planes for spec in model.mixers], 16, torch.float32)
    limits = RunConfig(device="cuda", max_num_seqs=slots, block_size=16, kv_cache_memory=blocks * size)
    loaded = build_engine(LoadedModel(model, MODELS["e4m3"], ops, torch.float32, device), limits, switches)
    done = {c.request.id: c.token_ids for c in loaded.engine.run(_requests())}
    assert done == {c.request.id: c.token_ids for c in plain_engine("e4m3").run(_requests())}
    assert (loaded.engine.stats.preemptions > 0) == (blocks == 4)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("family", ["Llama", "Qwen3", "GPT2"])
def test_graphs_give_the_tokens_of_launches(family, dtype, saved_model):
    """Bit for bit: padding rows wrote to the first block, and only graphs have such rows."""
    name = str(dtype).removeprefix("torch.")

    def tokens(**switches):
        options = {"kv_cache_dtype": "fp8", "max_num_seqs": 64, "block_size": 16, "switches": switches}
        return greedy(engine_of(saved_model(family), name, "cuda", **options), _LONG, 24)

    assert tokens() == tokens(cuda_graph=False)


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_first_tokens_are_those_of_pytorch(family, saved_model):
    """In bf16, where most rows' likeliest token does not hang on a rounding."""

    def tokens(**switches):
        options = {"kv_cache_dtype": "fp8", "max_num_seqs": 64, "block_size": 16, "switches": switches}
        return greedy(engine_of(saved_model(family), "bfloat16", "cuda", **options), _LONG, 1)

    same = [a == b for a, b in zip(tokens(), tokens(paged_attention=False), strict=True)]
    assert sum(same) >= 0.8 * len(same)
