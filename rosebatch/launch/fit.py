"""Whether a model, its longest row and the sequences at a time fit a device: found before anything is loaded."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from rosebatch.config.model import ModelConfig, Planes
from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.errors import FlagError
from rosebatch.core.plain import dtype_name
from rosebatch.core.words import counted
from rosebatch.engine.cache.kv_cache import bytes_per_block
from rosebatch.engine.cache.memory import DeviceMemory, MemoryPlan, min_slots, plan_memory, step_bytes, swap_bytes
from rosebatch.engine.metrics.roofline import weight_bytes
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.block_tables import BlockTables
from rosebatch.model.quantization.chosen import PLAIN, Quantization, choose_quantization
from rosebatch.ops.layout import FP8_ROWS
from rosebatch.ops.select import keeps
from rosebatch.ops.shard import require_divisible

_GIB = 1 << 30
_MOST_RANKS = 64
_HIGHEST_SHARE = 0.97
# The trial of ``--batch-invariant`` in front of the first bf16 product with the output projection takes so many of it.
_TRIAL_HEADS = 3
# Pixels of images that take little memory, and show a page of text well.
SMALL_IMAGE = 1 << 20
# Of a way out that needs a size: some thousand tokens of most models.
_SMALL_CACHE = "1GiB"


@dataclass(frozen=True, slots=True)
class Wanted:
    """A model, and how it is to run.

    Attributes:
        name: of the model, for people.
        dtype: of weights and activations, and of K and V unless ``config`` has another.
        gpus: that this machine has.
        quantization: of the matrices of layers.
        image_bytes: that images may take in each process, see ``rosebatch.engine.images.image_bytes``.
        small_image_bytes: the same with ``--max-pixels`` of ``SMALL_IMAGE``.
        draft_weights, draft_planes: of a head for drafts: numbers, and what it keeps of each token.
        adapter_bytes: of adapters that rows choose, in all processes together: of those that are there at a time.
        adapters, adapter_slots: how many rows choose from, and how many may be in a step.
    """

    name: str
    config: ModelConfig
    dtype: torch.dtype
    block_size: int
    limits: RunConfig
    switches: Switches
    gpus: int = 0
    quantization: Quantization = PLAIN
    image_bytes: int = 0
    small_image_bytes: int = 0
    draft_weights: int = 0
    draft_planes: tuple[Planes, ...] = ()
    adapter_bytes: int = 0
    adapters: int = 0
    adapter_slots: int = 0

    def weights(self, device: str) -> int:
        """Bytes of weights in each process."""
        kept = self.quantization.kept(self.switches, device, self.dtype)
        size = weight_bytes(self.config, self.dtype.itemsize, kept) + self.adapter_bytes
        if device == "cpu" and self.config.tie_word_embeddings and self.config.head:
            # Its rows are read one by one as the embedding, and its products are in a layout of their own.
            size += self.head
        size += self.draft_weights * self.dtype.itemsize
        return -(-size // self.limits.tensor_parallel_size)

    def form(self, device: str) -> str:
        """What the weights are, in words."""
        has_experts = self.config.experts is not None
        described = self.quantization.described(self.switches, device, self.dtype, has_experts=has_experts)
        return described or dtype_name(self.dtype)

    @property
    def head(self) -> int:
        """Bytes of the output projection."""
        return self.config.vocab_size * self.config.hidden_size * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class Fit:
    """What a model that fits takes of a device, in bytes, and what then has room there.

    Attributes:
        longest: tokens of a row that has the KV cache for itself.
        together: sequences at a time.
        longest_together: of them, those of the longest length; further ones wait.
    """

    wanted: Wanted
    memory: DeviceMemory
    cache: int
    longest: int
    together: int
    longest_together: int

    def __str__(self) -> str:
        """One line for people."""
        wanted, model = self.wanted, self.wanted.config.max_model_len
        weights = f"{gib(wanted.weights(self.memory.device))} of weights ({wanted.form(self.memory.device)})"
        allowed = f" (the model allows {model})" if self.longest < model else ""
        few = f", {self.longest_together} of that length" if self.longest_together < self.together else ""
        form = " (fp8)" if wanted.config.kv_cache_dtype == "fp8" else ""
        if wanted.adapter_slots < wanted.adapters:
            weights += f" with {wanted.adapter_slots} of {wanted.adapters} adapters at a time"
        weights += _images(wanted)
        kept = f"{gib(self.cache)} of KV cache{form}" if wanted.config.kv_planes else "no KV cache,"
        room = f"{kept} for a row of up to {counted(self.longest, 'token')}{allowed}"
        room += f", at most {counted(self.together, 'row')} at once{few}"
        return f"fits: {weights} and {room}, in {_counted_memory(wanted, self.memory)}{_ranks(wanted)}"


def find_fit(wanted: Wanted, memory: DeviceMemory) -> Fit:
    """What a run takes of its device.

    Args:
        wanted: the model and its limits.
        memory: of the device, before the weights are loaded.

    Raises:
        FlagError: it does not fit; the message says what does.
    """
    fit = _fit(wanted, memory)
    if fit is None:
        raise FlagError(f"{wanted.name} does not fit: {_need(wanted, memory)}; {_ways(wanted, memory)}")
    asked = wanted.limits.max_model_len
    # Who gives the size of the cache knows that it bounds a row.
    if asked is not None and fit.longest < asked and wanted.limits.kv_cache_memory is None:
        weights = f"{gib(wanted.weights(memory.device))} of weights{_ranks(wanted)}"
        room = f"{gib(fit.cache)} of KV cache are left beside {weights}"
        ways = " or ".join([f"--max-model-len {fit.longest}", *_longer(wanted, memory)])
        raise FlagError(f"--max-model-len {asked}: a row of so many tokens does not fit: {room}; {ways} would")
    return fit


def require_room_for_adapters(count: int, size: int, free: int) -> None:
    """Check that the host has room for adapters that the GPU has none for.

    Args:
        count: of the run.
        size: bytes of one.
        free: bytes of the host's memory.

    Raises:
        FlagError: it has not.
    """
    if count * size > free:
        most = max(free // size, 1)
        raise FlagError(
            f"--lora: {count} adapters take {gib(count * size)} of the host's memory, {gib(free)} is free: "
            f"give each run {counted(most, 'adapter')} at most"
        )


def _fit(wanted: Wanted, memory: DeviceMemory) -> Fit | None:
    config, limits = wanted.config, wanted.limits
    taken = wanted.weights(memory.device) + wanted.image_bytes
    left = memory.after(taken)
    if memory.device == "cpu":
        # Its processes have the memory together. Other workers may have loaded theirs already.
        if _all_weights(wanted) > memory.total:
            return None
        left = memory.after(taken * limits.tensor_parallel_size)
    try:
        plan = _plan(wanted, left)
    except FlagError:
        if limits.kv_cache_memory is None:
            return None
        raise
    cache = sum(group.blocks * size for group, size in zip(plan.groups, _block_sizes(wanted, plan), strict=True))
    # A prompt that is computed whole may be longer than the budget.
    tokens = max(plan.max_num_batched_tokens, config.max_model_len * config.bidirectional)
    step = step_bytes(config, tokens, plan.max_num_seqs, wanted.dtype)
    states = (plan.max_num_seqs + plan.snapshots) * _state_bytes(wanted)
    # The trial ends before a row fills its blocks.
    tries = memory.device == "cpu" and wanted.switches.batch_invariant and wanted.dtype == torch.bfloat16
    trial = _TRIAL_HEADS * wanted.head // limits.tensor_parallel_size if tries and config.head else 0
    # Who gives the size of the cache answers for what is free.
    room = left.free if limits.kv_cache_memory is None else max(left.free, left.total - left.taken)
    if max(cache + step + states, trial) > room:
        return None
    pools = (BlockPool(group.blocks, wanted.block_size, group.window) for group in plan.groups)
    held = BlockTables([*pools]).max_sequence_len(chunked=wanted.switches.chunked_prefill)
    longest, slots = min(held or config.max_model_len, config.max_model_len), plan.max_num_seqs
    return Fit(wanted, memory, cache, longest, slots, min(held // longest, slots) if held else slots)


def _plan(wanted: Wanted, left: DeviceMemory) -> MemoryPlan:
    """As the engine will make it, of the shape alone."""
    return plan_memory(
        wanted.config,
        _planes(wanted),
        wanted.limits,
        wanted.block_size,
        wanted.dtype,
        left,
        _state_bytes(wanted),
        wanted.config.kv_windows + [0] * bool(wanted.draft_planes),
        whole_prompts=not wanted.switches.chunked_prefill,
        fused_sampler=wanted.switches.fused_sampler,
        host_bytes=swap_bytes(wanted.limits) if wanted.switches.swap else 0,
    )


def _planes(wanted: Wanted) -> list[tuple[Planes, ...]]:
    """Of each layer, in one process."""
    ranks = wanted.limits.tensor_parallel_size
    layers = [*wanted.config.kv_planes, *[wanted.draft_planes] * bool(wanted.draft_planes)]
    return [tuple(planes._replace(heads=max(planes.heads // ranks, 1)) for planes in layer) for layer in layers]


def _block_sizes(wanted: Wanted, plan: MemoryPlan) -> list[int]:
    """Bytes of a block in the layers of each group."""
    planes = list(zip(_planes(wanted), plan.group_of, strict=True))
    members = ([layer for layer, group in planes if group == number] for number in range(len(plan.groups)))
    return [bytes_per_block(layers, wanted.block_size, wanted.dtype) for layers in members]


def _state_bytes(wanted: Wanted) -> int:
    return wanted.config.state_bytes(wanted.dtype.itemsize) // wanted.limits.tensor_parallel_size


def _all_weights(wanted: Wanted) -> int:
    """Bytes of weights of all workers on this machine."""
    limits = wanted.limits
    alone = limits.data_parallel_size == "auto" or limits.ray is not None
    return wanted.weights("cpu") * limits.tensor_parallel_size * (1 if alone else limits.data_parallel_size)  # type: ignore


def _need(wanted: Wanted, memory: DeviceMemory) -> str:
    """What is too much, in words."""
    limits = wanted.limits
    weights = f"{gib(wanted.weights(memory.device))} of weights in {wanted.form(memory.device)}{_ranks(wanted)}"
    weights += _images(wanted)
    workers = limits.data_parallel_size
    if memory.device == "cpu" and workers != 1 and _all_weights(wanted) > memory.total >= wanted.weights("cpu"):
        return f"{workers} workers take {weights} each, the machine has {gib(memory.total)}"
    rest = "" if wanted.weights(memory.device) > memory.free else ", and a step and a row beside them"
    share = limits.gpu_memory_utilization
    used = f" with --gpu-memory-utilization {share}" if memory.device == "cuda" else ""
    return f"{weights}{rest}, in {_counted_memory(wanted, memory)}{used}"


def _ways(wanted: Wanted, memory: DeviceMemory) -> str:
    """What would fit, in words."""
    found = [way for way, other in _others(wanted, memory) if _fits(other, memory)] or _two_ways(wanted, memory)
    where = "GPUs" if memory.device == "cuda" else "a machine"
    ways = f"{' or '.join(found)} would fit" if found else f"take a smaller model, or {where} with more memory"
    given = replace(wanted, limits=replace(wanted.limits, kv_cache_memory=_SMALL_CACHE))
    if wanted.limits.kv_cache_memory is None and memory.free < memory.total and _fits(given, memory):
        ways += f"; if more is free, give --kv-cache-memory, such as {_SMALL_CACHE}: then all {gib(memory.total)} count"
    return ways


def _two_ways(wanted: Wanted, memory: DeviceMemory) -> list[str]:
    """The first two flags that fit together, in words; empty if no two do."""
    for way, other in _others(wanted, memory):
        for second, both in _others(other, memory):
            if _fits(both, memory):
                return [f"{way} and {second}"]
    return []


def _others(wanted: Wanted, memory: DeviceMemory) -> Iterator[tuple[str, Wanted]]:
    """Other flags, and what they make of it."""
    limits = wanted.limits
    if memory.device == "cuda" and (divided := _divided(wanted, memory)) is not None:
        yield divided
    if wanted.quantization == PLAIN and keeps(FP8_ROWS, wanted.switches, memory.device, wanted.dtype):
        yield "--quantization fp8", replace(wanted, quantization=choose_quantization("fp8", None))
    if 0 < wanted.small_image_bytes < wanted.image_bytes:
        yield f"--max-pixels {SMALL_IMAGE}", replace(wanted, image_bytes=wanted.small_image_bytes)
    if wanted.image_bytes:
        yield "--limit-images 0", replace(wanted, image_bytes=0)
    if wanted.dtype == torch.float32:
        yield "--dtype bfloat16", replace(wanted, dtype=torch.bfloat16)
    if memory.device == "cpu" and wanted.switches.batch_invariant:
        yield "--no-batch-invariant", replace(wanted, switches=replace(wanted.switches, batch_invariant=False))
    seqs = min_slots(limits)
    while seqs > 1:
        seqs //= 2
        fewer = replace(wanted, limits=replace(limits, max_num_seqs=seqs))
        if _fits(fewer, memory):
            yield f"--max-num-seqs {seqs}", fewer
            break
    if memory.device == "cuda" and limits.gpu_memory_utilization < _HIGHEST_SHARE:
        share = replace(limits, gpu_memory_utilization=_HIGHEST_SHARE)
        yield f"--gpu-memory-utilization {_HIGHEST_SHARE}", replace(wanted, limits=share)
    if memory.device == "cpu" and limits.data_parallel_size not in (1, "auto"):
        yield "-dp 1", replace(wanted, limits=replace(limits, data_parallel_size=1))
    if limits.kv_cache_memory is not None:
        yield "leaving out --kv-cache-memory", replace(wanted, limits=replace(limits, kv_cache_memory=None))
    if limits.max_num_batched_tokens is not None:
        default = replace(limits, max_num_batched_tokens=None)
        yield "leaving out --max-num-batched-tokens", replace(wanted, limits=default)


def _divided(wanted: Wanted, memory: DeviceMemory) -> tuple[str, Wanted] | None:
    """The fewest GPUs that hold it together."""
    for size in range(wanted.limits.tensor_parallel_size + 1, _MOST_RANKS + 1):
        other = replace(wanted, limits=replace(wanted.limits, tensor_parallel_size=size))
        try:
            require_divisible(wanted.config, size)
        except FlagError:
            continue
        if _fits(other, memory):
            there = "" if size <= wanted.gpus else f" (with {size} such GPUs; this process sees {wanted.gpus})"
            return f"-tp {size}{there}", other
    return None


def _longer(wanted: Wanted, memory: DeviceMemory) -> Iterator[str]:
    """Flags with which a row of the asked length fits."""
    asked = wanted.limits.max_model_len or 0
    for way, other in _others(wanted, memory):
        fit = _fit(other, memory)
        if fit is not None and fit.longest >= asked:
            yield way
    if memory.device == "cpu":
        blocks = -(-asked // wanted.block_size)
        size = -(-blocks * bytes_per_block(_planes(wanted), wanted.block_size, wanted.dtype) // _GIB)
        given = replace(wanted, limits=replace(wanted.limits, kv_cache_memory=f"{size}GiB"))
        if (fit := _fit(given, memory)) is not None and fit.longest >= asked:
            yield f"--kv-cache-memory {size}GiB"


def _fits(wanted: Wanted, memory: DeviceMemory) -> bool:
    return _fit(wanted, memory) is not None


def _images(wanted: Wanted) -> str:
    return f", {gib(wanted.image_bytes)} for images" if wanted.image_bytes else ""


def _ranks(wanted: Wanted) -> str:
    ranks = wanted.limits.tensor_parallel_size
    return "" if ranks == 1 else f" on each of {ranks} ranks"


def _counted_memory(wanted: Wanted, memory: DeviceMemory) -> str:
    """What counts, in words: all of it for who gives the size of the cache."""
    what = "GPU memory" if memory.device == "cuda" else "memory"
    if wanted.limits.kv_cache_memory is not None and memory.free < memory.total:
        return f"{gib(memory.total)} of {what}, {gib(memory.free)} of it free"
    return f"{gib(memory.free)} of free {what}"


def gib(size: int) -> str:
    """Bytes for people."""
    return f"{size / _GIB:.2f} GiB" if size >= _GIB // 10 else f"{size / 2**20:.1f} MiB"
