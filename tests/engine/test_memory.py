"""How memory is divided: limits are followed to the letter, and a small GPU is not overrun by a single step."""

import pytest
import torch

from rosebatch.config import EngineConfig, ModelConfig
from rosebatch.engine import memory
from rosebatch.engine.kv_cache import bytes_per_block
from rosebatch.engine.memory import plan_memory, step_bytes
from rosebatch.errors import FlagError

# Of the size of Llama-3.1-8B.
LARGE = ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=14336,
    max_model_len=131072,
    norm_eps=1e-5,
    activation="silu",
)
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
GIB = 1 << 30


@pytest.fixture
def free(monkeypatch):
    """Set what is free."""

    def set_free(size):
        monkeypatch.setattr(memory, "_free_memory", lambda device: size)

    return set_free


def test_a_large_gpu(free):
    free(60 * GIB)
    plan = plan_memory(LARGE, EngineConfig(), 64, torch.bfloat16, CUDA)
    assert plan.max_num_batched_tokens == 16384
    taken = plan.num_blocks * bytes_per_block(LARGE, 64, torch.bfloat16)
    assert 50 * GIB < taken < 60 * GIB - step_bytes(LARGE, 16384, 256, torch.bfloat16)


def test_a_small_gpu_takes_smaller_steps(free):
    free(6 * GIB)
    plan = plan_memory(LARGE, EngineConfig(), 64, torch.bfloat16, CUDA)
    assert plan.max_num_batched_tokens == 4096
    taken = plan.num_blocks * bytes_per_block(LARGE, 64, torch.bfloat16)
    assert 3 * GIB < taken < 6 * GIB - step_bytes(LARGE, 4096, 256, torch.bfloat16)


def test_limits_are_followed(free):
    free(6 * GIB)
    limits = EngineConfig(max_num_batched_tokens=9999, kv_cache_memory=GIB)
    plan = plan_memory(LARGE, limits, 64, torch.bfloat16, CUDA)
    assert plan.max_num_batched_tokens == 9999
    assert plan.num_blocks == GIB // bytes_per_block(LARGE, 64, torch.bfloat16)


def test_no_more_than_all_sequences_at_full_length(free):
    free(60 * GIB)
    assert plan_memory(LARGE, EngineConfig(max_num_seqs=1), 64, torch.bfloat16, CUDA).num_blocks == 131072 // 64


def test_a_cpu_takes_a_quarter_and_at_most_4_gib(free):
    block = bytes_per_block(LARGE, 16, torch.bfloat16)
    for size, taken in ((8 * GIB, 2 * GIB), (100 * GIB, 4 * GIB)):
        free(size)
        plan = plan_memory(LARGE, EngineConfig(), 16, torch.bfloat16, CPU)
        assert (plan.num_blocks, plan.max_num_batched_tokens) == (taken // block, 1024)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_no_room_for_a_block(free, device):
    free(1 << 20)
    with pytest.raises(FlagError, match="a block of 64 tokens takes 8388608 bytes"):
        plan_memory(LARGE, EngineConfig(), 64, torch.bfloat16, device)
