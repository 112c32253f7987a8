"""A model that several processes hold together gives the tokens of one: every family, in fp32, against transformers."""

import pytest
import torch

from rosebatch.bench.scenario import configs_dir
from rosebatch.config.model import ModelConfig
from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.config.toml_file import load_toml
from rosebatch.core.errors import FlagError
from rosebatch.engine.cache.kv_cache import bytes_per_block
from rosebatch.model.source import find_model
from rosebatch.ops.shard import require_divisible
from tests.helpers.families import FAMILIES, MODELS, VARIANTS
from tests.helpers.threads_group import make_tensor_parallel_engine

CPU = torch.device("cpu")
FAST = ["gpt2", "hp1", "olmo2", "phi3", "gpt_oss", "qwen3_next"]
CASES = [
    pytest.param(name, marks=() if name in FAST else pytest.mark.thorough) for name in [*MODELS, *FAMILIES, *VARIANTS]
]


@pytest.fixture
def divided(goldens):
    """Makes an engine on a golden, held by so many ranks."""

    def make(name, size, *, seqs=64, chunk=8192, block_size=16, blocks=0, kv_cache_dtype="auto", **switches):
        model = RunConfig(model=str(goldens(name).folder), dtype="float32", kv_cache_dtype=kv_cache_dtype)
        source = find_model(model, CPU)
        require_divisible(source.config, size)
        whole = blocks * bytes_per_block(source.config.kv_planes, block_size, source.dtype)
        memory = whole // min(size, source.config.num_kv_heads) or 64 << 20
        limits = RunConfig(
            max_num_seqs=seqs,
            max_num_batched_tokens=chunk,
            block_size=block_size,
            kv_cache_memory=memory,
            tensor_parallel_size=size,
        )
        return make_tensor_parallel_engine(source, limits, Switches.resolve(switches, "cpu"), size)

    return make


@pytest.mark.whole
@pytest.mark.parametrize("name", CASES)
def test_two_ranks_give_the_tokens_of_one(name, goldens, divided, greedy_tokens):
    """A head, channel, expert or row of the vocabulary that is read twice, or by nobody, changes tokens."""
    golden = goldens(name)
    engine = divided(name, 2, seqs=6, chunk=24, block_size=4, blocks=64)
    assert greedy_tokens(engine, golden.prompts[:12]) == golden.expected[:12]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_two_ranks_with_k_and_v_in_8_bits(name, goldens, divided, make_engine, greedy_tokens):
    """Each head has scales of its own, so a rank's are those of one process."""
    prompts = goldens(name).prompts[:12]
    one = greedy_tokens(make_engine(goldens(name).folder, kv_cache_dtype="fp8"), prompts)
    engine = divided(name, 2, seqs=6, chunk=24, block_size=4, blocks=64, kv_cache_dtype="fp8")
    assert greedy_tokens(engine, prompts) == one


def test_heads_of_mamba2_with_one_b_and_c_stay_together():
    """Each rank's norm would be over a part of the channels."""
    config = load_toml(configs_dir() / "models" / "granite-4.0-h-small.toml", ModelConfig)
    with pytest.raises(FlagError, match="1 groups of heads of Mamba2, which cannot be divided by 2"):
        require_divisible(config, 2)


@pytest.mark.whole
@pytest.mark.thorough
@pytest.mark.parametrize("name", [*MODELS, *FAMILIES])
def test_four_ranks_give_the_tokens_of_one(name, goldens, divided, greedy_tokens):
    """More ranks than K/V heads hold these twice."""
    golden = goldens(name)
    try:
        engine = divided(name, 4, seqs=6, chunk=24, block_size=4, blocks=64)
    except FlagError as error:
        pytest.skip(str(error))
    assert greedy_tokens(engine, golden.prompts[:12]) == golden.expected[:12]
