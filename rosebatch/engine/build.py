"""A model that is loaded and limits -> an engine: memory, scheduler, runner and drafts."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import torch

from rosebatch.config.model import ModelConfig, Planes
from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.pooling_params import PLAIN_POOLING, ModelPooling
from rosebatch.engine.cache.kv_cache import KVCache
from rosebatch.engine.cache.memory import KVGroup, MemoryPlan, max_slots, memory_of, plan_memory, swap_bytes
from rosebatch.engine.cache.state_pool import StatePool, state_bytes
from rosebatch.engine.drafts.chosen import choose_drafts, windows_may_draft
from rosebatch.engine.engine import Engine
from rosebatch.engine.images import ImageEncoder
from rosebatch.engine.long_rope import restart_policy
from rosebatch.engine.plan import AdapterKey, RestartPolicy
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.step_planner import MIXED, SeparateDecodes, StepPolicy
from rosebatch.engine.step_runner import StepRunner
from rosebatch.engine.torch_runner.runner import TorchRunner
from rosebatch.engine.triton_runner.runner import TritonRunner
from rosebatch.engine.triton_runner.state import draft_bytes
from rosebatch.model.contract import NO_HEADS, Model, PoolingHeads
from rosebatch.model.eagle3.head import Eagle3Head
from rosebatch.ops.adapters import AdapterRows, StackedRows
from rosebatch.ops.device import device_ops
from rosebatch.ops.layout import MatrixBytes
from rosebatch.ops.ops import Ops

# Tokens of a block: a unit of a GPU's reads; on a CPU, prefixes are rounded down to it.
_BLOCK_SIZE = {"cuda": 64, "cpu": 16}
# Decode steps in a window, before the host reads their tokens.
_DECODE_WINDOW = 8


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model on its device, and what comes with it.

    Attributes:
        model: the weights, and the mixer of each layer.
        config: lengths, vocabulary and end tokens.
        ops: the operators that the model was built with.
        dtype: of activations, and of K and V unless their planes have another.
        device: where the model is.
        generates: whether it has an output projection.
        pooling: the model's own.
        pooling_heads: what follows it.
        images: encodes them; None for a model of text.
        image_bytes: see the function of this name.
        kept: what the matrices of layers take; None: they are plain.
        head: drafts for the model; None for no such drafts.
        adapters: that requests may name.
        adapter_rows: where the model's linears look for each row's; None for a model without adapters.
        adapter_slots: of adapters that are there at a time; 0 for all.
    """

    model: Model
    config: ModelConfig
    ops: Ops
    dtype: torch.dtype
    device: torch.device
    generates: bool = True
    pooling: ModelPooling = PLAIN_POOLING
    pooling_heads: PoolingHeads = NO_HEADS
    images: ImageEncoder | None = None
    image_bytes: int = 0
    kept: MatrixBytes | None = None
    head: Eagle3Head | None = None
    adapters: Mapping[str, AdapterKey] = field(default_factory=lambda: MappingProxyType({}))
    adapter_rows: AdapterRows | StackedRows | None = None
    adapter_slots: int = 0

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Those that it can sample: others are -1, which means none, or beyond its vocabulary."""
        return tuple(i for i in self.config.eos_token_ids if 0 <= i < self.config.vocab_size)

    @property
    def has_states(self) -> bool:
        """Whether any layer keeps states."""
        return any(spec.states for spec in self.model.mixers)


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine and what was decided for it.

    Attributes:
        groups: the KV cache's groups of layers.
        waits: why its steps cannot be CUDA graphs; None unless the model is the reason.
        is_compiled: whether the kernels of plain steps are compiled already.
    """

    engine: Engine
    groups: tuple[KVGroup, ...]
    block_size: int
    kv_cache_bytes: int
    waits: str | None = None
    is_compiled: bool = False

    @property
    def num_blocks(self) -> int:
        """Blocks of all groups."""
        return sum(group.blocks for group in self.groups)


def choose_block_size(limits: RunConfig, device: torch.device) -> int:
    """Tokens of a block: the limit if it is given, else what suits the device."""
    return limits.block_size or _BLOCK_SIZE[device.type]


def build_engine(
    loaded: LoadedModel,
    limits: RunConfig,
    switches: Switches,
    minimum: Callable[[Sequence[int]], list[int]] = list[int],
    drive: Callable[[StepRunner], StepRunner] | None = None,
) -> LoadedEngine:
    """Size the KV cache, and put the engine together.

    Args:
        loaded: the model.
        limits: the engine's.
        switches: resolved here into runner, operators and scheduling.
        minimum: see ``plan_memory``.
        drive: makes the driver's runner, given that of its own shard; None for a worker or a whole model.

    Raises:
        FlagError: the KV cache has no room for a single block.
    """
    model, config = loaded.model, loaded.config
    block_size = choose_block_size(limits, loaded.device)
    by_triton = loaded.device.type == "cuda" and switches.paged_attention
    memory = _plan_memory(loaded, limits, switches, block_size, by_triton=by_triton, minimum=minimum)
    if any(spec.whole_prompts for spec in model.mixers):
        switches = replace(switches, chunked_prefill=False, prefix_cache=False)
    whole_images = loaded.images is not None and loaded.images.both_ways != ""
    if whole_images and switches.batch_invariant:
        # Hopper's kernel has no ends of keys: beside an image, a text would be computed by the other one.
        switches = replace(switches, hopper_prefill=False)
    window = _DECODE_WINDOW if switches.fused_sampler and switches.late_results else 1
    restarts = restart_policy(model.mixers)
    scheduler = _scheduler(
        memory,
        block_size,
        switches,
        SeparateDecodes(window) if by_triton else MIXED,
        restarts,
        math.lcm(*(spec.chunk_unit for spec in model.mixers)),
        has_states=loaded.has_states,
        whole_images=whole_images,
        adapter_slots=loaded.adapter_slots,
    )
    # One block more than in the scheduler's pools: kernels write there what is not read.
    counts = [group.blocks + by_triton for group in memory.groups]
    layers, dtype, device = [planes for planes, _ in _cached(loaded)], loaded.dtype, loaded.device
    cache = KVCache(layers, counts, block_size, dtype, device, loaded.ops, memory.group_of)
    longest = min(config.max_model_len, scheduler.max_sequence_len or config.max_model_len)
    if by_triton:
        runner: TorchRunner | TritonRunner = _triton_runner(loaded, switches, cache, memory, restarts, window, longest)
    else:
        runner = _torch_runner(loaded, switches, cache, memory, restarts)
    engine = Engine(
        scheduler,
        runner if drive is None else drive(runner),
        vocab_size=config.num_token_ids,
        max_model_len=config.max_model_len,
        eos_token_ids=loaded.eos_token_ids,
        async_depth=int(by_triton and switches.late_results),
        hidden_size=loaded.pooling.size(config.hidden_size),
        generates=loaded.generates,
        pooling=loaded.pooling,
        drafter=choose_drafts(
            scheduler, runner, config, limits, dtype, loaded.kept, invariant=switches.batch_invariant
        ),
        adapters=loaded.adapters,
    )
    return LoadedEngine(engine, memory.groups, block_size, cache.nbytes)


def _cached(loaded: LoadedModel) -> Sequence[tuple[tuple[Planes, ...], int]]:
    """Planes and window of each layer that keeps K and V; of a head for drafts, at the end."""
    layers = [(spec.planes, spec.window) for spec in loaded.model.mixers if spec.planes and not spec.shares]
    return layers if loaded.head is None else [*layers, (loaded.head.planes, 0)]


def _plan_memory(
    loaded: LoadedModel,
    limits: RunConfig,
    switches: Switches,
    block_size: int,
    *,
    by_triton: bool,
    minimum: Callable[[Sequence[int]], list[int]],
) -> MemoryPlan:
    """What fits beside the model, its images and what drafts need."""
    model, config = loaded.model, loaded.config
    drafts = by_triton and windows_may_draft(model, config, limits)
    others = loaded.image_bytes + (draft_bytes(max_slots(limits), config.max_model_len) if drafts else 0)
    layers, windows = zip(*_cached(loaded), strict=True) if _cached(loaded) else ((), ())
    return plan_memory(
        config,
        layers,
        limits,
        block_size,
        loaded.dtype,
        memory_of(loaded.device).after(others),
        state_bytes([spec.states for spec in model.mixers if spec.states], loaded.dtype),
        windows=windows,
        whole_prompts=not switches.chunked_prefill,
        fused_sampler=switches.fused_sampler,
        host_bytes=swap_bytes(limits) if switches.swap else 0,
        minimum=minimum,
    )


def _scheduler(
    memory: MemoryPlan,
    block_size: int,
    switches: Switches,
    policy: StepPolicy,
    restarts: RestartPolicy | None,
    chunk_unit: int,
    *,
    has_states: bool,
    whole_images: bool,
    adapter_slots: int,
) -> Scheduler:
    """The scheduler of what memory has room for. Sequences with states share what there are snapshots for."""
    shares = memory.snapshots > 0 or not has_states
    return Scheduler(
        *(BlockPool(group.blocks, block_size, group.window) for group in memory.groups),
        max_num_seqs=memory.max_num_seqs,
        max_num_batched_tokens=memory.max_num_batched_tokens,
        policy=policy,
        prefix_cache=switches.prefix_cache and shares,
        chunked_prefill=switches.chunked_prefill,
        restarts=restarts,
        exact_prefixes=switches.batch_invariant,
        share_prompts=shares,
        host_blocks=memory.host_blocks,
        replays=switches.replays,
        chunk_unit=chunk_unit,
        snapshots=memory.snapshots,
        whole_images=whole_images,
        adapter_slots=adapter_slots,
    )


def _triton_runner(
    loaded: LoadedModel,
    switches: Switches,
    cache: KVCache,
    memory: MemoryPlan,
    restarts: RestartPolicy | None,
    window: int,
    max_len: int,
) -> TritonRunner:
    assert not isinstance(loaded.adapter_rows, AdapterRows), "kernels add what adapters do"
    return TritonRunner(
        loaded.model,
        cache,
        loaded.ops,
        device_ops(switches),
        switches,
        vocab_size=loaded.config.vocab_size,
        eos_token_ids=loaded.eos_token_ids,
        max_num_seqs=memory.max_num_seqs,
        max_len=max_len,
        window=window,
        states=_states(loaded, memory),
        restarts=restarts,
        images=loaded.images,
        pooling_heads=loaded.pooling_heads,
        adapters=loaded.adapter_rows,
    )


def _torch_runner(
    loaded: LoadedModel, switches: Switches, cache: KVCache, memory: MemoryPlan, restarts: RestartPolicy | None
) -> TorchRunner:
    assert not isinstance(loaded.adapter_rows, StackedRows), "products add what adapters do"
    return TorchRunner(
        loaded.model,
        cache,
        loaded.ops,
        _states(loaded, memory),
        restarts=restarts,
        images=loaded.images,
        pooling_heads=loaded.pooling_heads,
        batched_sampling=switches.batched_sampling,
        trim_last_layer=switches.trim_last_layer,
        head=loaded.head,
        adapters=loaded.adapter_rows,
    )


def _states(loaded: LoadedModel, memory: MemoryPlan) -> StatePool | None:
    layers = [spec.states for spec in loaded.model.mixers if spec.states]
    if not layers:
        return None
    return StatePool(layers, memory.max_num_seqs, memory.snapshots, loaded.dtype, loaded.device, loaded.ops)
