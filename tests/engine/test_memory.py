"""How memory is divided: limits are followed to the letter, and a small GPU is not overrun by a single step."""

import pytest
import torch

from rosebatch.config import KVShape, ModelConfig, RunConfig
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
BF16 = torch.bfloat16


@pytest.fixture
def gpu(monkeypatch):
    """Set what a GPU has: bytes that are free, all of them (those, if not given), and what this process has taken."""

    def set_memory(free, total=None, taken=0):
        found = memory._GPUMemory(free, free if total is None else total, taken)
        monkeypatch.setattr(memory, "_gpu_memory", lambda device: found)

    return set_memory


@pytest.fixture
def host(monkeypatch):
    """Set what is free on the host."""
    return lambda free: monkeypatch.setattr(memory, "_free_host_memory", lambda: free)


def plan(limits=None, block_size=64, device=CUDA, kv_dtype=BF16, kv_shapes=LARGE.kv_shapes):
    return plan_memory(LARGE, kv_shapes, limits or RunConfig(), block_size, BF16, kv_dtype, device)


BLOCK = bytes_per_block(LARGE.kv_shapes, 64, BF16)


def test_a_large_gpu(gpu):
    """The default share of all of it, but for the weights and what a step allocates."""
    gpu(free=64 * GIB, total=80 * GIB, taken=16 * GIB)
    found = plan()
    assert found.max_num_batched_tokens == 16384
    assert found.groups[0].blocks == (int(0.9 * 80 * GIB - 16 * GIB) - step_bytes(LARGE, 16384, 256, BF16)) // BLOCK


def test_states_come_out_of_the_same_memory(gpu):
    """A slot for each seat lies beside the blocks: what both take together must be there."""
    gpu(free=64 * GIB, total=80 * GIB, taken=16 * GIB)
    rest = int(0.9 * 80 * GIB - 16 * GIB) - step_bytes(LARGE, 16384, 256, BF16) - 256 * 50_000_000
    found = plan_memory(LARGE, LARGE.kv_shapes, RunConfig(), 64, BF16, BF16, CUDA, 50_000_000)
    assert found.groups[0].blocks == rest // BLOCK


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_the_share_is_of_the_whole_gpu(share, gpu):
    """What this process has taken counts: weights and cache together take the share, however large the weights are."""
    gpu(free=64 * GIB, total=80 * GIB, taken=16 * GIB)
    memory = int(share * 80 * GIB - 16 * GIB) - step_bytes(LARGE, 16384, 256, BF16)
    assert plan(RunConfig(gpu_memory_utilization=share)).groups[0].blocks == memory // BLOCK


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_other_processes_keep_what_they_have(share, gpu):
    """Half of the GPU is another's: the share is then of what is free, or the cache would not fit."""
    gpu(free=24 * GIB, total=80 * GIB, taken=16 * GIB)
    memory = int(min(share * 24 * GIB, share * 80 * GIB - 16 * GIB)) - step_bytes(LARGE, 16384, 256, BF16)
    assert plan(RunConfig(gpu_memory_utilization=share)).groups[0].blocks == memory // BLOCK


def test_a_small_gpu_takes_smaller_steps(gpu):
    gpu(6 * GIB)
    found = plan()
    assert found.max_num_batched_tokens == 4096
    assert found.groups[0].blocks == (int(0.9 * 6 * GIB) - step_bytes(LARGE, 4096, 256, BF16)) // BLOCK
    assert 3 * GIB < found.groups[0].blocks * BLOCK < 6 * GIB - step_bytes(LARGE, 4096, 256, BF16)


@pytest.mark.parametrize("size", [GIB, "1GiB"])
def test_limits_are_followed(size, gpu):
    gpu(6 * GIB)
    found = plan(RunConfig(max_num_batched_tokens=9999, kv_cache_memory=size, gpu_memory_utilization=0.01))
    assert found.max_num_batched_tokens == 9999
    assert found.groups[0].blocks == GIB // BLOCK


def test_no_more_than_all_sequences_at_full_length(gpu):
    gpu(60 * GIB)
    assert plan(RunConfig(max_num_seqs=1)).groups[0].blocks == 131072 // 64


def test_blocks_are_as_large_as_their_layers_and_dtype(gpu):
    """K and V in 8 bits take half, the activations of a step do not; layers may differ."""
    gpu(60 * GIB)
    half = RunConfig(kv_cache_memory=GIB)
    assert plan(half, kv_dtype=torch.float8_e4m3fn).groups[0].blocks == 2 * plan(half).groups[0].blocks
    shapes = (KVShape(8, 128),) * 30 + (KVShape(2, 256),) * 2
    assert plan(half, kv_shapes=shapes).groups[0].blocks == GIB // (2 * 64 * 2 * (30 * 8 * 128 + 2 * 2 * 256))


def test_a_cpu_takes_a_quarter_and_at_most_4_gib(host):
    block = bytes_per_block(LARGE.kv_shapes, 16, BF16)
    for size, taken in ((8 * GIB, 2 * GIB), (100 * GIB, 4 * GIB)):
        host(size)
        found = plan(block_size=16, device=CPU)
        assert (found.groups[0].blocks, found.max_num_batched_tokens) == (taken // block, 1024)


@pytest.mark.parametrize("device", [CPU, CUDA])
def test_no_room_for_a_block(gpu, host, device):
    gpu(1 << 20)
    host(1 << 20)
    with pytest.raises(FlagError, match="a block of 64 tokens takes 8388608 bytes"):
        plan(device=device)


def test_the_weights_alone_exceed_the_share(gpu):
    """The message, and no cache of a negative size."""
    gpu(free=20 * GIB, total=80 * GIB, taken=60 * GIB)
    with pytest.raises(FlagError, match=r"utilization 0\.5 leaves 0 .* a block of 64 tokens takes 8388608 bytes"):
        plan(RunConfig(gpu_memory_utilization=0.5))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (RunConfig(gpu_memory_utilization=0.1), r"^--gpu-memory-utilization 0\.1 leaves 0 bytes for the KV cache"),
        (RunConfig(gpu_memory_utilization=0.1, kv_cache_memory=1), r"^--kv-cache-memory 1: a block of 64 tokens takes"),
    ],
)
def test_no_room_names_the_flag_that_left_none(limits, message, gpu):
    """The message was "--kv-cache-memory 0" for a flag that nobody gave."""
    gpu(free=10 * GIB, total=80 * GIB, taken=70 * GIB)
    with pytest.raises(FlagError, match=message):
        plan(limits)


def test_no_room_on_a_cpu(host):
    """There the share is fixed, and the flag that mends it is the cache's own."""
    host(1000)
    with pytest.raises(FlagError, match=r"^the free memory leaves 250 bytes .*: give --kv-cache-memory"):
        plan(device=CPU)
