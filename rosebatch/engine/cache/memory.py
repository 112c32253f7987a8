"""Divides a device's memory, once the weights are in it, between the KV cache and what a step needs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from rosebatch.config.model import ModelConfig, Planes
from rosebatch.config.run import RunConfig
from rosebatch.core.errors import FlagError
from rosebatch.engine.cache.host_store import BUFFER_BYTES
from rosebatch.engine.cache.kv_cache import bytes_per_block
from rosebatch.engine.cache.windows import max_blocks, window_groups
from rosebatch.host.memory import host_memory

# Default tokens of a step. On a CPU, a step's activations should fit its caches: 1024 tokens at a time prefill
# 1.4 times as fast as 4096 (benchmarks/NOTEBOOK/2026-11.md).
_BATCHED_TOKENS = {"cuda": 16384, "cpu": 1024}
# On a small GPU, steps get smaller until one takes no more than this share of the free memory.
_FEWEST_TOKENS = 2048
_STEP_SHARE = 0.25
# Sequences at a time, if memory decides: so many tokens of the KV cache are there for each.
_SLOT_TOKENS = 1024
_MIN_SLOTS, _MAX_SLOTS = 256, 1024
# Snapshots of states: one for so many sequences that run, but a few. The prompts of a step seldom need more.
_SEQS_A_SNAPSHOT = 8
_FEWEST_SNAPSHOTS, _MOST_SNAPSHOTS = 4, 64
# Share of a CPU's free memory that the KV cache takes.
_CPU_SHARE = 0.25
_CPU_MOST = 4 << 30
# Share of a GPU's memory beside the weights that adapters may take, where nobody says how many are there at a time.
_ADAPTER_SHARE = 0.25
# Share of the host's free memory for preempted sequences. PyTorch rounds pinned memory up to powers of two, which at
# most doubles it.
_HOST_SHARE = 0.125


class DeviceMemory(NamedTuple):
    """Bytes of a device.

    Attributes:
        device: ``cuda`` or ``cpu``.
        free: by this moment.
        total: all of it.
        taken: by this process on a GPU, the weights included.
    """

    device: str
    free: int
    total: int
    taken: int = 0

    def after(self, size: int) -> "DeviceMemory":
        """As it will be once so many bytes more are taken."""
        return self._replace(free=self.free - size, taken=self.taken + size)


class KVGroup(NamedTuple):
    """Layers with the same sliding window: their number, and the blocks of each. A window of 0 is full attention."""

    window: int
    layers: int
    blocks: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """The KV cache, and most tokens and sequences of a step.

    Attributes:
        groups: of its layers, see ``window_groups``; none if nothing is kept of tokens.
        group_of: the number of each layer's group.
        host_blocks: of the host's memory, for preempted sequences.
        snapshots: of states.
    """

    groups: tuple[KVGroup, ...]
    group_of: tuple[int, ...]
    max_num_batched_tokens: int
    max_num_seqs: int
    host_blocks: int = 0
    snapshots: int = 0


def plan_memory(
    config: ModelConfig,
    layers: Sequence[Sequence[Planes]],
    limits: RunConfig,
    block_size: int,
    dtype: torch.dtype,
    device: DeviceMemory,
    state_bytes: int = 0,
    windows: Sequence[int] | None = None,
    whole_prompts: bool = False,
    fused_sampler: bool = True,
    host_bytes: int = 0,
    minimum: Callable[[Sequence[int]], list[int]] = list[int],
) -> MemoryPlan:
    """Follow the limits that are given; the device decides the others.

    Args:
        config: of the model.
        layers: the planes of each layer with a KV cache.
        limits: of the engine.
        block_size: tokens of a KV cache block.
        dtype: of activations.
        device: with the weights in it.
        state_bytes: that a sequence's states take next to its blocks, and a snapshot of them.
        windows: the sliding window of each layer; None for full attention in all.
        whole_prompts: whether a prompt is computed in one step, however long.
        fused_sampler: without it, sampling takes several times the memory of the logits, so memory decides no slots.
        host_bytes: of the host, for preempted sequences; without use where layers have windows or states.
        minimum: the least of each number over the processes that hold the model: all make the same plan.

    Raises:
        FlagError: the KV cache has no room for a single block.
    """
    windows, group_of = window_groups(windows or [0] * len(layers), config.max_model_len)
    if windows != (0,) or state_bytes:
        # Window groups give blocks back while a sequence runs, and no block holds a state.
        host_bytes = 0
    # Chunks end where snapshots are, which stand behind blocks of whole beginnings.
    shares = state_bytes > 0 and not whole_prompts and windows == (0,)
    free = device.free
    tokens = batched_tokens(limits, device.device)
    slots = min_slots(limits)
    if device.device == "cuda":
        step = step_bytes(config, tokens, slots, dtype)
        while not limits.max_num_batched_tokens and tokens > _FEWEST_TOKENS and step > _STEP_SHARE * free:
            tokens //= 2
            step = step_bytes(config, tokens, slots, dtype)
    if not layers:
        # Nothing is kept of a prompt: a step has as many as its tokens allow.
        slots = max_slots(limits) if device.device == "cuda" else slots
        tokens, slots = minimum([tokens, slots])
        return MemoryPlan((), (), tokens, slots)
    if device.device == "cuda":
        # The share of the whole GPU, less what this process has taken; and never more than that share of what is free.
        share = limits.gpu_memory_utilization
        usable = int(min(share * device.total - device.taken, share * free)) - (BUFFER_BYTES if host_bytes else 0)
        if fused_sampler and limits.max_num_seqs == "auto":
            of_states = state_bytes + shares * state_bytes // _SEQS_A_SNAPSHOT
            row = -(-_SLOT_TOKENS // block_size) * bytes_per_block(layers, block_size, dtype) + of_states
            left = limits.kv_cache_bytes or usable - step_bytes(config, tokens, _MAX_SLOTS, dtype)
            slots = min(max(left // row // 64 * 64, slots), _MAX_SLOTS)
        memory = usable - step_bytes(config, tokens, slots, dtype)
    else:
        memory = min(int(_CPU_SHARE * free), _CPU_MOST) // _sharers(limits)
    states = slots + shares * num_snapshots(slots)
    memory = limits.kv_cache_bytes or max(memory - states * state_bytes, 0)
    tokens, memory, slots, host_bytes = minimum([tokens, memory, slots, host_bytes])
    members = [[p for p, group in zip(layers, group_of, strict=True) if group == n] for n in range(len(windows))]
    longest = config.max_model_len
    # A whole prompt may begin at the end of the budget.
    limit = {"longest": longest, "slots": slots, "chunk": tokens + longest * whole_prompts}
    sizes = [bytes_per_block(each, block_size, dtype) for each in members]
    blocks = share_memory(memory, sizes, [max_blocks(window, block_size, **limit) for window in windows])
    if min(blocks) < 1 or min(blocks) * block_size < 2:
        raise FlagError(_no_room(limits, device.device, memory, block_size, sum(sizes)))
    groups = tuple(map(KVGroup, windows, map(len, members), blocks))
    snapshots = num_snapshots(slots) if shares else 0
    return MemoryPlan(groups, group_of, tokens, slots, min(blocks[0], host_bytes // sizes[0]), snapshots)


def adapter_slots(size: int, limits: RunConfig, device: DeviceMemory) -> int:
    """How many adapters have room on a GPU: the limit, or what fits into a share of it.

    Args:
        size: bytes of one.
        limits: of the engine.
        device: with the weights in it.
    """
    share = limits.gpu_memory_utilization
    usable = min(share * device.total - device.taken, share * device.free)
    return limits.max_loras or max(int(_ADAPTER_SHARE * usable) // max(size, 1), 1)


def swap_bytes(limits: RunConfig) -> int:
    """Bytes of the host's free memory that preempted sequences of this process may take."""
    return int(_HOST_SHARE * host_memory().free) // _sharers(limits)


def min_slots(limits: RunConfig) -> int:
    """Sequences at a time, before a GPU's memory allows more."""
    return _MIN_SLOTS if limits.max_num_seqs == "auto" else limits.max_num_seqs


def max_slots(limits: RunConfig) -> int:
    """Sequences at a time, as far as a GPU's memory allows."""
    return _MAX_SLOTS if limits.max_num_seqs == "auto" else limits.max_num_seqs


def num_snapshots(slots: int) -> int:
    """Snapshots of states beside those of so many sequences at a time."""
    return min(max(slots // _SEQS_A_SNAPSHOT, _FEWEST_SNAPSHOTS), _MOST_SNAPSHOTS)


def batched_tokens(limits: RunConfig, device: str) -> int:
    """Maximum tokens of a step with prompts, before the memory of a small GPU lowers it."""
    return limits.max_num_batched_tokens or _BATCHED_TOKENS[device]


def share_memory(memory: int, sizes: Sequence[int], limits: Sequence[int]) -> list[int]:
    """Divide bytes between groups, each with the bytes of a block and the most blocks that it uses.

    All get the same number of blocks, but none more than it uses. So no window group runs out before a full one,
    however short the sequences are: the memory is never worth less than without groups.
    """
    counts = [0] * len(sizes)
    left = sorted(range(len(sizes)), key=lambda group: limits[group])
    while left:
        group = left[0]
        counts[group] = min(memory // sum(sizes[each] for each in left), limits[group])
        memory -= counts[group] * sizes[group]
        del left[0]
    return counts


def _no_room(limits: RunConfig, device: str, memory: int, block_size: int, block: int) -> str:
    """Which limit left no room for a block, and what to change."""
    needed = f"a block of {block_size} tokens takes {block} bytes"
    if limits.kv_cache_bytes:
        given = str(limits.kv_cache_memory)
        return f"--kv-cache-memory {given}: {needed}{'; a size has a unit, such as 4GiB' if given.isdecimal() else ''}"
    if device == "cuda":
        left = f"--gpu-memory-utilization {limits.gpu_memory_utilization} leaves {memory} bytes for the KV cache"
        return f"{left}, {needed}: raise it, or lower --max-num-batched-tokens or --max-num-seqs"
    return f"the free memory leaves {memory} bytes for the KV cache, {needed}: give --kv-cache-memory"


def step_bytes(config: ModelConfig, tokens: int, seqs: int, dtype: torch.dtype) -> int:
    """Maximum bytes of a GPU step of so many tokens, logits included; twice, because graphs keep their own."""
    # The MLP's input and both inner tensors; or those of the shared expert, and what a token's experts make.
    mlp = 3 * config.inner_size(config.num_layers - 1)
    if config.experts:
        routed = config.experts.experts_per_token * (config.experts.expert_size + config.hidden_size)
        # What the dense MLP makes is there until the experts' result is.
        beside = config.hidden_size * config.experts.beside_mlp
        of_all = 3 * config.experts.shared_size + beside
        mlp = max(mlp, of_all + config.hidden_size + routed + config.experts.num_experts)
    # Next to residuals and norms, old and new.
    wide = mlp + 4 * config.hidden_size + config.mixer_channels
    if inputs := config.layer_inputs:
        # Those of all layers are there until the last, and twice while they are made.
        wide += 3 * config.num_layers * inputs.size
    return 2 * (tokens * wide + seqs * config.vocab_size * config.head) * dtype.itemsize


def memory_of(device: torch.device) -> DeviceMemory:
    """The memory of this process' device as it is now."""
    if device.type == "cuda":
        return DeviceMemory("cuda", *torch.cuda.mem_get_info(device), torch.cuda.memory_reserved(device))
    return DeviceMemory("cpu", *host_memory())


def _sharers(limits: RunConfig) -> int:
    """Processes of a run that share the host's memory."""
    replicas = 1 if limits.data_parallel_size == "auto" else limits.data_parallel_size
    return replicas * limits.tensor_parallel_size
