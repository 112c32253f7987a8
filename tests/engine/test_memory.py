"""How memory is divided: limits are followed to the letter, and a small GPU is not overrun by a single step."""

from types import SimpleNamespace

import msgspec
import pytest
import torch

from rosebatch.config.model import ModelConfig, Planes
from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.errors import FlagError
from rosebatch.engine.cache.host_store import BUFFER_BYTES
from rosebatch.engine.cache.kv_cache import bytes_for_longest, bytes_per_block
from rosebatch.engine.cache.memory import DeviceMemory, plan_memory, share_memory, step_bytes
from rosebatch.engine.load import resident_adapters
from rosebatch.model.quantization.chosen import PLAIN

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
GIB = 1 << 30
BF16 = torch.bfloat16


# What the devices of a test have.
MEMORIES = {}


def gpu(free, total=None, taken=0):
    """A GPU has bytes that are free, all of them (those, if not given), and what this process has taken."""
    MEMORIES["cuda"] = DeviceMemory("cuda", free, free if total is None else total, taken)


def host(free):
    """So much is free on the host."""
    MEMORIES["cpu"] = DeviceMemory("cpu", free, free)


def plan(limits=None, block_size=64, device="cuda", layers=LARGE.kv_planes):
    return plan_memory(LARGE, layers, limits or RunConfig(), block_size, BF16, MEMORIES[device])


BLOCK = bytes_per_block(LARGE.kv_planes, 64, BF16)


@pytest.mark.parametrize(
    ("size", "limits", "expected"),
    [
        # A quarter of 56 GiB beside the weights.
        (GIB, {}, 14),
        (GIB, {"gpu_memory_utilization": 0.6}, 8),
        (GIB, {"max_loras": 3}, 3),
        (GIB, {"max_loras": 99}, 40),
        (2**20, {}, 40),
        # One has to be there, however large.
        (99 * GIB, {}, 1),
    ],
)
def test_adapters_at_a_time(monkeypatch, size, limits, expected):
    """All were loaded, and K and V had no room."""
    gpu(free=80 * GIB)
    monkeypatch.setattr("rosebatch.engine.load.memory_of", lambda device: MEMORIES[device.type])
    monkeypatch.setattr("rosebatch.engine.load.weight_bytes", lambda *_: 16 * GIB)
    source = SimpleNamespace(by_row=range(40), adapter_slot_bytes=size, config=LARGE, dtype=BF16, quantization=PLAIN)
    switches = Switches.resolve({}, "cuda")
    assert resident_adapters(source, RunConfig(**limits), switches, torch.device("cuda")) == expected
    # Products of all are there, whatever the limit.
    host(free=GIB)
    on_cpu = resident_adapters(source, RunConfig(**limits), Switches.resolve({}, "cpu"), torch.device("cpu"))
    assert on_cpu == min(limits.get("max_loras", 40), 40)


def test_a_large_gpu():
    """The default share of all of it, but for the weights and what a step allocates."""
    gpu(free=64 * GIB, total=80 * GIB, taken=16 * GIB)
    found = plan()
    assert (found.max_num_batched_tokens, found.max_num_seqs) == (16384, 384)
    assert found.groups[0].blocks == (int(0.9 * 80 * GIB - 16 * GIB) - step_bytes(LARGE, 16384, 384, BF16)) // BLOCK


def test_states_come_out_of_the_same_memory():
    """States of all slots, and their snapshots, are in memory next to the blocks: there must be room for both."""
    gpu(free=64 * GIB, total=80 * GIB, taken=16 * GIB)
    rest = int(0.9 * 80 * GIB - 16 * GIB) - step_bytes(LARGE, 16384, 256, BF16) - 288 * 50_000_000
    found = plan_memory(LARGE, LARGE.kv_planes, RunConfig(), 64, BF16, MEMORIES["cuda"], 50_000_000)
    assert (found.groups[0].blocks, found.snapshots) == (rest // BLOCK, 32)


def test_sequences_without_chunks_have_no_snapshots():
    """A chunk ends where a snapshot is: memory for those that nobody makes would be lost."""
    gpu(free=64 * GIB)
    model = LARGE, LARGE.kv_planes, RunConfig(), 64, BF16, MEMORIES["cuda"], 50_000_000
    chunked, whole = plan_memory(*model), plan_memory(*model, whole_prompts=True)
    assert whole.snapshots == 0 and whole.max_num_seqs == chunked.max_num_seqs
    more = (whole.groups[0].blocks - chunked.groups[0].blocks) * BLOCK
    assert abs(more - chunked.snapshots * 50_000_000) < BLOCK


@pytest.mark.parametrize(("free", "slots"), [(64, 384), (24, 256), (400, 1024)])
def test_memory_decides_how_many_sequences_run(free, slots):
    """More at a time share the reading of the weights; with fewer than 1,024 tokens each, they would be preempted."""
    gpu(free=free * GIB, total=(free + 16) * GIB, taken=16 * GIB)
    found = plan()
    tokens = found.groups[0].blocks * 64
    assert found.max_num_seqs == slots
    assert slots == 256 or 1024 * slots <= tokens
    assert slots == 1024 or tokens < 1024 * (slots + 64)


def test_a_given_number_of_sequences_is_kept():
    gpu(free=400 * GIB)
    host(free=400 * GIB)
    limits = {"max_num_seqs": 7}, {"kv_cache_memory": 300 * 16 * BLOCK}, {"kv_cache_memory": 330 * 16 * BLOCK}
    assert [plan(RunConfig(**limit)).max_num_seqs for limit in limits] == [7, 256, 320]
    assert plan(device="cpu").max_num_seqs == 256


def test_sampling_by_pytorch_keeps_to_few_sequences():
    """It sorts the logits, several times their memory, which the plan does not count."""
    gpu(free=400 * GIB)
    kinds = (LARGE, LARGE.kv_planes, RunConfig(), 64, BF16, MEMORIES["cuda"])
    assert plan_memory(*kinds).max_num_seqs == 1024
    assert plan_memory(*kinds, fused_sampler=False).max_num_seqs == 256


def test_states_count_for_the_number_of_sequences():
    gpu(free=400 * GIB)
    found = plan_memory(LARGE, LARGE.kv_planes, RunConfig(), 64, BF16, MEMORIES["cuda"], 5 * 10**8)
    assert (found.max_num_seqs, found.snapshots) == (512, 64)
    assert found.groups[0].blocks * BLOCK + 576 * 5 * 10**8 <= 0.9 * 400 * GIB


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_the_share_is_of_the_whole_gpu(share):
    """What this process has taken counts: weights and cache together take the share, however large the weights are."""
    gpu(free=64 * GIB, total=80 * GIB, taken=16 * GIB)
    found = plan(RunConfig(gpu_memory_utilization=share))
    memory = int(share * 80 * GIB - 16 * GIB) - step_bytes(LARGE, 16384, found.max_num_seqs, BF16)
    assert found.groups[0].blocks == memory // BLOCK


@pytest.mark.parametrize("share", [0.5, 0.9, 1.0])
def test_other_processes_keep_what_they_have(share):
    """Half of the GPU is another's: the share is then of what is free, or the cache would not fit."""
    gpu(free=24 * GIB, total=80 * GIB, taken=16 * GIB)
    memory = int(min(share * 24 * GIB, share * 80 * GIB - 16 * GIB)) - step_bytes(LARGE, 16384, 256, BF16)
    assert plan(RunConfig(gpu_memory_utilization=share)).groups[0].blocks == memory // BLOCK


def test_a_small_gpu_takes_smaller_steps():
    gpu(6 * GIB)
    found = plan()
    assert found.max_num_batched_tokens == 4096
    assert found.groups[0].blocks == (int(0.9 * 6 * GIB) - step_bytes(LARGE, 4096, 256, BF16)) // BLOCK
    assert 3 * GIB < found.groups[0].blocks * BLOCK < 6 * GIB - step_bytes(LARGE, 4096, 256, BF16)


@pytest.mark.parametrize("size", [GIB, "1GiB"])
def test_limits_are_followed(size):
    gpu(6 * GIB)
    found = plan(RunConfig(max_num_batched_tokens=9999, kv_cache_memory=size, gpu_memory_utilization=0.01))
    assert (found.max_num_batched_tokens, found.groups[0].blocks) == (9999, GIB // BLOCK)


def test_no_more_than_all_sequences_at_full_length():
    gpu(60 * GIB)
    assert plan(RunConfig(max_num_seqs=1)).groups[0].blocks == 131072 // 64


def test_blocks_are_as_large_as_their_layers_and_dtype():
    """K and V in 8 bits take half, and a scale of each head; layers may differ."""
    gpu(60 * GIB)
    half = RunConfig(kv_cache_memory=GIB)
    stored = msgspec.structs.replace(LARGE, kv_cache_dtype="fp8").kv_planes
    heads, width = LARGE.num_kv_heads, LARGE.head_dim
    assert plan(half, layers=stored).groups[0].blocks == GIB // (2 * 64 * LARGE.num_layers * heads * (width + 4))
    layers = ((Planes(8, 128, 2),),) * 30 + ((Planes(2, 256, 2),),) * 2
    assert plan(half, layers=layers).groups[0].blocks == GIB // (2 * 64 * 2 * (30 * 8 * 128 + 2 * 2 * 256))


def test_a_cpu_takes_a_quarter_and_at_most_4_gib():
    block = bytes_per_block(LARGE.kv_planes, 16, BF16)
    for size, taken in ((8 * GIB, 2 * GIB), (100 * GIB, 4 * GIB)):
        host(size)
        found = plan(block_size=16, device="cpu")
        assert (found.groups[0].blocks, found.max_num_batched_tokens) == (taken // block, 1024)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_room_for_a_block(device):
    gpu(1 << 20)
    host(1 << 20)
    with pytest.raises(FlagError, match="a block of 64 tokens takes 8388608 bytes"):
        plan(device=device)


def test_the_weights_alone_exceed_the_share():
    """The message, and no cache of a negative size."""
    gpu(free=20 * GIB, total=80 * GIB, taken=60 * GIB)
    with pytest.raises(FlagError, match=r"utilization 0\.5 leaves 0 .* a block of 64 tokens takes 8388608 bytes"):
        plan(RunConfig(gpu_memory_utilization=0.5))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        (RunConfig(gpu_memory_utilization=0.1), r"^--gpu-memory-utilization 0\.1 leaves 0 bytes for the KV cache"),
        (RunConfig(gpu_memory_utilization=0.1, kv_cache_memory=1), r"^--kv-cache-memory 1: a block .* such as 4GiB$"),
    ],
)
def test_no_room_names_the_flag_that_left_none(limits, message):
    """The message was "--kv-cache-memory 0" for a flag that nobody gave."""
    gpu(free=10 * GIB, total=80 * GIB, taken=70 * GIB)
    with pytest.raises(FlagError, match=message):
        plan(limits)


def test_no_room_on_a_cpu():
    """There the share is fixed, and the flag that mends it is the cache's own."""
    host(1000)
    with pytest.raises(FlagError, match=r"^the free memory leaves 250 bytes .*: give --kv-cache-memory"):
        plan(device="cpu")


# Groups of layers with windows.

# Of Gemma-3-4B's kind: every third layer is full.
MIXED_WINDOWS = [0 if layer % 3 == 2 else 1024 for layer in range(32)]
FULL_LAYERS, WINDOW_LAYERS = MIXED_WINDOWS.count(0), MIXED_WINDOWS.count(1024)
LAYER_BLOCK = BLOCK // 32


def windowed(limits, windows=MIXED_WINDOWS, **options):
    return plan_memory(LARGE, LARGE.kv_planes, limits, 64, BF16, MEMORIES["cuda"], windows=windows, **options)


def test_the_host_holds_preempted_sequences():
    """By its memory, but no more blocks than the cache has; the device gives the buffers up that lie between."""
    gpu(60 * GIB)
    cache, none = plan().groups[0].blocks, windowed(RunConfig(), [0] * 32)
    assert none.host_blocks == 0
    few = windowed(RunConfig(), [0] * 32, host_bytes=7 * BLOCK + 1)
    assert (few.host_blocks, few.groups[0].blocks) == (7, cache - -(-BUFFER_BYTES // BLOCK))
    all_ = windowed(RunConfig(), [0] * 32, host_bytes=1000 * GIB)
    assert all_.host_blocks == all_.groups[0].blocks
    assert windowed(RunConfig(), [0] * 32, host_bytes=BLOCK - 1).host_blocks == 0
    least = windowed(RunConfig(), [0] * 32, host_bytes=9 * BLOCK, minimum=lambda numbers: [*numbers[:3], 2 * BLOCK])
    assert least.host_blocks == 2


def test_windows_and_states_are_computed_again():
    """A window's blocks are partly gone, and states are in no block: what came back would be too little."""
    gpu(60 * GIB)
    assert windowed(RunConfig(), host_bytes=GIB) == windowed(RunConfig())
    states = {"windows": [0] * 32, "state_bytes": 10**6}
    assert windowed(RunConfig(), host_bytes=GIB, **states) == windowed(RunConfig(), **states)


def test_one_group_is_planned_as_ever():
    """Full attention, windows as long as the model, and one window for all: as many blocks as without groups."""
    gpu(60 * GIB)
    expected = plan()
    assert expected.groups == ((0, 32, expected.groups[0].blocks),)
    for windows in ([0] * 32, [131072] * 32, [0, 200000] * 16):
        assert windowed(RunConfig(), windows) == expected
    few = RunConfig(kv_cache_memory=GIB)
    assert windowed(few, [4096] * 32).groups == ((4096, 32, plan(few).groups[0].blocks),)


def test_windows_take_what_all_seats_use_and_full_layers_the_rest():
    """All layers had blocks for whole sequences: two thirds of the memory held keys that nobody reads."""
    gpu(60 * GIB)
    full, window = windowed(RunConfig(kv_cache_memory=40 * GIB, max_num_seqs=64)).groups
    # 1023 keys in front of a token lie in at most 17 blocks; one to spare for each, and a step's new blocks.
    assert window == (1024, WINDOW_LAYERS, 64 * 18 + 16384 // 64 + 2)
    rest = 40 * GIB - window.blocks * WINDOW_LAYERS * LAYER_BLOCK
    assert full == (0, FULL_LAYERS, rest // (FULL_LAYERS * LAYER_BLOCK))
    assert full.blocks > 2 * plan(RunConfig(kv_cache_memory=40 * GIB)).groups[0].blocks


def test_scarce_memory_is_divided_evenly():
    """A window group with fewer blocks than the full one would stop short sequences that fitted before."""
    gpu(60 * GIB)
    limits = RunConfig(kv_cache_memory=GIB)
    assert {group.blocks for group in windowed(limits).groups} == {plan(limits).groups[0].blocks}


def test_whole_prompts_fit_the_windows_blocks():
    """Without chunks a prompt has all its blocks at once, behind those of a full step, in layers with a window too."""
    gpu(60 * GIB)
    _, window = windowed(RunConfig(kv_cache_memory=40 * GIB, max_num_seqs=4), whole_prompts=True).groups
    assert window.blocks == 4 * 18 + (16384 + 131072) // 64 + 2


@pytest.mark.parametrize("memory", [1, 10**6, 10**9, 10**12])
@pytest.mark.parametrize("limits", [[7, 7, 7], [100, 5, 900], [10**9, 3, 3]])
def test_a_division_gives_no_more_than_there_is(memory, limits):
    """Bytes handed out twice would not be there when the tensors are made; bytes left over serve nobody."""
    sizes = [64, 1000, 37]
    counts = share_memory(memory, sizes, limits)
    taken = sum(count * size for count, size in zip(counts, sizes, strict=True))
    assert taken <= memory and all(count <= limit for count, limit in zip(counts, limits, strict=True))
    short = [size for count, size, limit in zip(counts, sizes, limits, strict=True) if count < limit]
    assert memory - taken < sum(short) or not short
    assert len({count for count, limit in zip(counts, limits, strict=True) if count < limit}) <= 1


def test_the_longest_rows_take_windows_only():
    """``check`` and ``bench`` asked for whole sequences in all layers: twice the memory of such a model, or more."""
    config = msgspec.structs.replace(LARGE, sliding_windows=tuple(MIXED_WINDOWS))
    needed = bytes_for_longest(config, 64, BF16, [8128] * 9, 8, 1024)
    window = 8 * 18 + 1024 // 64 + 2
    assert needed == 8 * 128 * FULL_LAYERS * LAYER_BLOCK + window * WINDOW_LAYERS * LAYER_BLOCK
    # Short ones have no more blocks there than elsewhere.
    assert bytes_for_longest(config, 64, BF16, [100] * 9, 8, 1024) == 8 * 3 * BLOCK


def test_a_head_for_drafts_has_a_layer_of_the_longest_rows():
    """``check`` said that less is enough, and ``bench`` measured preemptions."""
    arguments = LARGE, 64, BF16, [100] * 9, 8, 1024
    more = bytes_for_longest(*arguments, (Planes(8, 128, 2), Planes(1, 4096))) - bytes_for_longest(*arguments)
    assert more == 8 * 3 * 64 * 2 * (2 * 8 * 128 + 4096)


def test_a_plan_within_the_bytes_of_the_longest_rows_holds_them():
    """An estimate that the division then spends on windows left full layers short, and a timed run preempted."""
    gpu(60 * GIB)
    config = msgspec.structs.replace(LARGE, sliding_windows=tuple(MIXED_WINDOWS))
    for length in (100, 900, 3000, 8128, 100000):
        needed = bytes_for_longest(config, 64, BF16, [length] * 8, 8, 1024)
        full, window = windowed(RunConfig(kv_cache_memory=needed, max_num_seqs=8, max_num_batched_tokens=1024)).groups
        assert full.blocks >= 8 * -(-length // 64)
        assert window.blocks >= min(8 * -(-length // 64), 8 * 18 + 18)


def test_processes_share_the_memory_of_a_host():
    """Each of four took a quarter of what was free: together all of it."""
    host(8 * GIB)
    alone, together = (plan(RunConfig(data_parallel_size=size), 16, "cpu").groups[0].blocks for size in (1, 4))
    assert together == alone // 4
    limited = RunConfig(data_parallel_size=4, kv_cache_memory="1GiB")
    assert plan(limited, 16, "cpu") == plan(RunConfig(kv_cache_memory="1GiB"), 16, "cpu"), "that is for each"


ENCODER = ModelConfig(
    family="bert",
    vocab_size=250002,
    hidden_size=1024,
    num_layers=24,
    num_heads=16,
    num_kv_heads=16,
    head_dim=64,
    intermediate_size=4096,
    max_model_len=8192,
    norm_eps=1e-5,
    activation="gelu",
    bidirectional=True,
    head=False,
)


@pytest.mark.parametrize(("free", "tokens"), [(60 * GIB, 16384), (2 * GIB, 4096), (GIB // 4, 2048)])
def test_a_model_that_keeps_nothing(free, tokens):
    """There is no cache to divide by, and no logits take memory from a step."""
    memory = DeviceMemory("cuda", free, free)
    found = plan_memory(ENCODER, ENCODER.kv_planes, RunConfig(), 64, BF16, memory, whole_prompts=True)
    assert (found.groups, found.group_of, found.max_num_batched_tokens, found.max_num_seqs) == ((), (), tokens, 1024)
    found = plan_memory(ENCODER, (), RunConfig(max_num_seqs=7), 16, BF16, DeviceMemory("cpu", free, free))
    assert (found.groups, found.max_num_batched_tokens, found.max_num_seqs) == ((), 1024, 7)
    assert step_bytes(ENCODER, 1, 1000, BF16) == step_bytes(ENCODER, 1, 1, BF16)
