"""From a model source and limits to an engine that is ready to run."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch

from rosebatch.config.model import ModelConfig
from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.errors import FlagError
from rosebatch.core.pooling_params import PLAIN_POOLING, ModelPooling
from rosebatch.engine.cache.kv_cache import KVCache
from rosebatch.engine.cache.memory import (
    KVGroup,
    MemoryPlan,
    batched_tokens,
    max_slots,
    memory_of,
    plan_memory,
    swap_bytes,
)
from rosebatch.engine.cache.state_pool import StatePool, state_bytes
from rosebatch.engine.drafts.chosen import choose_drafts, windows_may_draft
from rosebatch.engine.drafts.window_drafter import QUERIES, WindowDrafter
from rosebatch.engine.engine import Engine
from rosebatch.engine.images import ImageEncoder, image_bytes, kept_bytes, together
from rosebatch.engine.long_rope import restart_policy
from rosebatch.engine.plan import AdapterSlot, RestartPolicy
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.scheduling.step_planner import MIXED, SeparateDecodes, StepPolicy
from rosebatch.engine.step_runner import StepRunner
from rosebatch.engine.torch_runner.runner import TorchRunner
from rosebatch.engine.triton_runner.packing import MAX_PADDED_TOKENS, padded_size
from rosebatch.engine.triton_runner.runner import TritonRunner
from rosebatch.engine.triton_runner.state import draft_bytes
from rosebatch.engine.triton_runner.warm_up import compile_for, hash_compiler
from rosebatch.model.adapters.by_row import by_row
from rosebatch.model.contract import NO_HEADS, Model, PoolingHeads
from rosebatch.model.eagle3.head import Eagle3Head
from rosebatch.model.fallback.load import Fallback
from rosebatch.model.source import ModelSource
from rosebatch.ops.adapters import AdapterRows, StackedRows
from rosebatch.ops.device import device_ops, keep_products_whole
from rosebatch.ops.layout import MatrixBytes
from rosebatch.ops.ops import Ops
from rosebatch.ops.select import select
from rosebatch.ops.tensor_parallel import Group, divide

# Tokens of a block: a unit of a GPU's reads; on a CPU, prefixes are rounded down to it.
_BLOCK_SIZE = {"cuda": 64, "cpu": 16}
# Decode steps in a window, before the host reads their tokens.
_DECODE_WINDOW = 8


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


def pick_device(name: str) -> torch.device:
    """``auto``, ``cpu`` or ``cuda`` -> a device.

    Raises:
        FlagError: ``cuda`` was asked for and there is none, or PyTorch is one for AMD's GPUs, which pass for CUDA.
    """
    if name != "cpu" and torch.version.hip is not None:
        raise FlagError(f"this PyTorch is for AMD GPUs (ROCm {torch.version.hip}), which are not served: --device cpu")
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise FlagError("--device cuda: PyTorch sees no CUDA device here")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and available) else "cpu")


def choose_block_size(limits: RunConfig, device: torch.device) -> int:
    """Tokens of a block: the limit if it is given, else what suits the device."""
    return limits.block_size or _BLOCK_SIZE[device.type]


def load_engine(
    source: ModelSource,
    limits: RunConfig,
    switches: Switches,
    device: torch.device,
    group: Group | None = None,
    drive: Callable[[StepRunner], StepRunner] | None = None,
) -> LoadedEngine:
    """Load the weights and build the engine.

    Args:
        source: the model's files.
        limits: the engine's.
        switches: all of them.
        device: the run's.
        group: the processes that hold the model together; None if this one holds it alone.
        drive: makes the driver's runner, given that of its own shard; None for a worker or a whole model.

    Raises:
        UserError: a weight is missing, or the model's files changed.
        FlagError: the KV cache has no room for a single block.
    """
    assert limits.sampler == "rosebatch" or not switches.fused_sampler, "the fused sampler is rosebatch's own"
    if device.type == "cuda" and switches.batch_invariant:
        keep_products_whole()
    if device.type == "cuda":
        # Convolutions of vision towers: by default PyTorch lets cuDNN round fp32 to 10 bits.
        torch.backends.cudnn.allow_tf32 = False
    ops = select(switches, device.type, limits.sampler, source.quantization.input_group)
    if group is not None:
        ops = divide(ops, group, in_order=switches.batch_invariant)
        if ops.fuses_all_reduce:
            tokens = batched_tokens(limits, device.type)
            rows = padded_size(tokens) if tokens <= MAX_PADDED_TOKENS else tokens
            group.prepare(rows, source.config.hidden_size, source.dtype)
    adapter_rows: AdapterRows | StackedRows | None = None
    if source.by_row:
        by_triton = device.type == "cuda" and switches.paged_attention
        adapter_rows = StackedRows(len(source.by_row), switches) if by_triton else AdapterRows()
        ops = by_row(ops, adapter_rows)
    hashed = hash_compiler() if device.type == "cuda" else None
    model, pooling_heads = source.build(ops, device), source.build_pooling_heads(ops, device)
    source.require_unchanged()
    waits = model.waits if isinstance(model, Fallback) else None
    if waits is not None:
        switches = replace(switches, cuda_graph=False)
    minimum = group.all_min if group else list[int]
    taken = image_bytes(source, limits, batched_tokens(limits, device.type))
    loaded = build_engine(
        model,
        source.config,
        limits,
        switches,
        ops,
        source.dtype,
        device,
        minimum,
        generates=source.has_head,
        drive=drive,
        pooling=source.pooling,
        pooling_heads=pooling_heads,
        images=_image_encoder(source, limits, switches, device) if taken else None,
        image_bytes=taken,
        kept=source.quantization.kept(switches, device.type, source.dtype),
        head=source.build_head(model, ops, device),
        adapters={name: AdapterSlot(number, salt) for number, (name, salt) in enumerate(source.salts.items(), 1)},
        adapter_rows=adapter_rows,
    )
    if hashed is not None:
        hashed()
    # Steps that a graph can hold can be warmed up. Ranks would have to begin together.
    warms_up = switches.parallel_compile and switches.cuda_graph and source.has_head and group is None
    is_compiled = warms_up and _warm_up(loaded, source, limits, switches)
    return replace(loaded, waits=waits, is_compiled=is_compiled)


def _image_encoder(
    source: ModelSource, limits: RunConfig, switches: Switches, device: torch.device
) -> ImageEncoder | None:
    """What encodes images, if the model sees. The tower is loaded at the first image."""
    vision = source.vision
    if vision is None:
        return None
    return ImageEncoder(
        lambda: vision.tower(source.weights(device)),
        vision.channel_sections,
        device,
        0 if switches.batch_invariant else together(source, limits),
        kept_bytes(source, limits),
        both_ways=vision.both_ways,
    )


def _warm_up(loaded: LoadedEngine, source: ModelSource, limits: RunConfig, switches: Switches) -> bool:
    """Compile the kernels of plain steps, if Triton runs the model; returns whether they are compiled."""
    engine, runner = loaded.engine, loaded.engine.runner
    if not isinstance(runner, TritonRunner):
        return False
    tokens, width = engine.max_num_batched_tokens, runner.slots.width
    # Triton compiles for widths that are multiples of 16, and for others.
    of_model = source.config, source.dtype, source.quantization.identity, source.adapter_ranks
    shape = *of_model, switches, limits.sampler, engine.max_num_seqs, loaded.block_size, limits.speculative
    forces = engine.scheduler.planner.forces > 0
    queries = QUERIES if isinstance(engine.drafter, WindowDrafter) else ()
    return compile_for(
        lambda: runner.warm_up(tokens, forces=forces, queries=queries), (*shape, tokens, width % 16 == 0)
    )


def build_engine(
    model: Model,
    config: ModelConfig,
    limits: RunConfig,
    switches: Switches,
    ops: Ops,
    dtype: torch.dtype,
    device: torch.device,
    minimum: Callable[[Sequence[int]], list[int]] = list[int],
    *,
    generates: bool = True,
    drive: Callable[[StepRunner], StepRunner] | None = None,
    pooling: ModelPooling = PLAIN_POOLING,
    pooling_heads: PoolingHeads = NO_HEADS,
    images: ImageEncoder | None = None,
    image_bytes: int = 0,
    kept: MatrixBytes | None = None,
    head: Eagle3Head | None = None,
    adapters: Mapping[str, AdapterSlot] = MappingProxyType({}),
    adapter_rows: AdapterRows | StackedRows | None = None,
) -> LoadedEngine:
    """Size the KV cache for a model that is loaded, and put the engine together.

    Args:
        model: the weights, and the mixer of each layer.
        config: lengths, vocabulary and end tokens.
        limits: the engine's.
        switches: resolved here into runner, operators and scheduling.
        ops: the operators that the model was built with.
        dtype: the dtype of activations, and of K and V unless their planes have another.
        device: where the model is.
        minimum: see ``plan_memory``.
        generates: whether the model has an output projection.
        drive: see ``load_engine``.
        pooling: the model's own.
        pooling_heads: what follows it.
        images: encodes them; None for a model of text.
        image_bytes: see the function of this name.
        kept: what the matrices of layers take; None: they are plain.
        head: drafts for the model; None for no such drafts.
        adapters: that requests may name.
        adapter_rows: where the model's linears look for each row's; None for a model without adapters.

    Raises:
        FlagError: the KV cache has no room for a single block.
    """
    block_size = choose_block_size(limits, device)
    by_triton = device.type == "cuda" and switches.paged_attention
    drafts = by_triton and windows_may_draft(model, config, limits)
    others = image_bytes + (draft_bytes(max_slots(limits), config.max_model_len) if drafts else 0)
    cached = [spec for spec in model.mixers if spec.planes]
    layers, windows = [spec.planes for spec in cached], [spec.window for spec in cached]
    if head is not None:
        layers, windows = [*layers, head.planes], [*windows, 0]
    state_layers = [spec.states for spec in model.mixers if spec.states]
    memory = plan_memory(
        config,
        layers,
        limits,
        block_size,
        dtype,
        memory_of(device).after(others),
        state_bytes(state_layers, dtype),
        windows=windows,
        whole_prompts=not switches.chunked_prefill,
        fused_sampler=switches.fused_sampler,
        host_bytes=swap_bytes(limits) if switches.swap else 0,
        minimum=minimum,
    )
    whole = any(spec.whole_prompts for spec in model.mixers)
    if whole:
        switches = replace(switches, chunked_prefill=False, prefix_cache=False)
    whole_images = images is not None and images.both_ways != ""
    if whole_images and switches.batch_invariant:
        # Hopper's kernel has no ends of keys: beside an image, a text would be computed by the other one.
        switches = replace(switches, hopper_prefill=False)
    window = _DECODE_WINDOW if switches.fused_sampler and switches.late_results else 1
    restarts = restart_policy(model.mixers)
    policy = SeparateDecodes(window) if by_triton else MIXED
    unit = math.lcm(*(spec.chunk_unit for spec in model.mixers))
    scheduler = _scheduler(
        memory,
        block_size,
        switches,
        policy,
        restarts,
        unit,
        has_states=bool(state_layers),
        whole_images=whole_images,
    )
    # One block more than in the scheduler's pools: kernels write there what is not read.
    counts = [group.blocks + by_triton for group in memory.groups]
    cache = KVCache(layers, counts, block_size, dtype, device, ops, memory.group_of)
    states = None
    if state_layers:
        states = StatePool(state_layers, memory.max_num_seqs, memory.snapshots, dtype, device, ops)
    # The model cannot sample the others: -1, which means none, or an id beyond its vocabulary.
    eos_token_ids = tuple(i for i in config.eos_token_ids if 0 <= i < config.vocab_size)
    runner: TorchRunner | TritonRunner
    if by_triton:
        assert not isinstance(adapter_rows, AdapterRows), "kernels add what adapters do"
        runner = TritonRunner(
            model,
            cache,
            ops,
            device_ops(switches),
            switches,
            vocab_size=config.vocab_size,
            eos_token_ids=eos_token_ids,
            max_num_seqs=memory.max_num_seqs,
            max_len=min(config.max_model_len, scheduler.max_sequence_len or config.max_model_len),
            window=window,
            states=states,
            restarts=restarts,
            images=images,
            pooling_heads=pooling_heads,
            adapters=adapter_rows,
        )
    else:
        assert not isinstance(adapter_rows, StackedRows), "products add what adapters do"
        runner = TorchRunner(
            model,
            cache,
            ops,
            states,
            restarts=restarts,
            images=images,
            pooling_heads=pooling_heads,
            batched_sampling=switches.batched_sampling,
            trim_last_layer=switches.trim_last_layer,
            head=head,
            adapters=adapter_rows,
        )
    engine = Engine(
        scheduler,
        runner if drive is None else drive(runner),
        vocab_size=config.num_token_ids,
        max_model_len=config.max_model_len,
        eos_token_ids=eos_token_ids,
        async_depth=int(by_triton and switches.late_results),
        hidden_size=pooling.size(config.hidden_size),
        generates=generates,
        pooling=pooling,
        drafter=choose_drafts(scheduler, runner, config, limits, dtype, kept, invariant=switches.batch_invariant),
        adapters=adapters,
    )
    return LoadedEngine(engine, memory.groups, block_size, cache.nbytes)


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
    )
