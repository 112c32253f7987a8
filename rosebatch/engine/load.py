"""From a model source and limits to an engine that is ready to run."""

from collections.abc import Callable
from dataclasses import replace

import torch

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.errors import FlagError
from rosebatch.engine.build import LoadedEngine, LoadedModel, build_engine
from rosebatch.engine.cache.memory import adapter_slots, batched_tokens, memory_of
from rosebatch.engine.drafts.window_drafter import QUERIES, WindowDrafter
from rosebatch.engine.images import ImageEncoder, image_bytes, kept_bytes, together
from rosebatch.engine.metrics.roofline import weight_bytes
from rosebatch.engine.plan import AdapterKey
from rosebatch.engine.step_runner import StepRunner
from rosebatch.engine.triton_runner.packing import MAX_PADDED_TOKENS, padded_size
from rosebatch.engine.triton_runner.runner import TritonRunner
from rosebatch.engine.triton_runner.warm_up import compile_for, hash_compiler
from rosebatch.model.adapters.by_row import by_row
from rosebatch.model.fallback.load import Fallback
from rosebatch.model.source import ModelSource
from rosebatch.ops.adapters import AdapterRows, StackedRows
from rosebatch.ops.device import keep_products_whole
from rosebatch.ops.select import select
from rosebatch.ops.tensor_parallel import Group, divide


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
    minimum = group.all_min if group else list[int]
    adapter_rows: AdapterRows | StackedRows | None = None
    slots = 0
    if source.by_row:
        (slots,) = minimum([resident_adapters(source, limits, switches, device)])
        adapter_rows = StackedRows(slots, switches) if stacks_adapters(switches, device) else AdapterRows()
        ops = by_row(ops, adapter_rows)
    hashed = hash_compiler() if device.type == "cuda" else None
    model, pooling_heads = source.build(ops, device), source.build_pooling_heads(ops, device)
    source.require_unchanged()
    waits = model.waits if isinstance(model, Fallback) else None
    if waits is not None:
        switches = replace(switches, cuda_graph=False)
    taken = image_bytes(source, limits, batched_tokens(limits, device.type))
    loaded = LoadedModel(
        model,
        source.config,
        ops,
        source.dtype,
        device,
        generates=source.has_head,
        pooling=source.pooling,
        pooling_heads=pooling_heads,
        images=_image_encoder(source, limits, switches, device) if taken else None,
        image_bytes=taken,
        kept=source.quantization.kept(switches, device.type, source.dtype),
        head=source.build_head(model, ops, device),
        adapters={name: AdapterKey(number, salt) for number, (name, salt) in enumerate(source.salts.items(), 1)},
        adapter_rows=adapter_rows,
        adapter_slots=slots if slots < len(source.by_row) else 0,
    )
    built = build_engine(loaded, limits, switches, minimum, drive)
    if hashed is not None:
        hashed()
    # Steps that a graph can hold can be warmed up. Ranks would have to begin together.
    warms_up = switches.parallel_compile and switches.cuda_graph and source.has_head and group is None
    is_compiled = warms_up and _warm_up(built, source, limits, switches)
    return replace(built, waits=waits, is_compiled=is_compiled)


def stacks_adapters(switches: Switches, device: torch.device) -> bool:
    """Whether kernels add what adapters do: then these are in slots of stacks."""
    return device.type == "cuda" and switches.paged_attention


def resident_adapters(source: ModelSource, limits: RunConfig, switches: Switches, device: torch.device) -> int:
    """How many of the adapters that rows choose may be in a step; on a GPU, those that are there at a time.

    It is asked before the weights are there.
    """
    count, ranks = len(source.by_row), limits.tensor_parallel_size
    if not stacks_adapters(switches, device):
        return min(count, limits.max_loras or count)
    kept = source.quantization.kept(switches, device.type, source.dtype)
    weights = weight_bytes(source.config, source.dtype.itemsize, kept) // ranks
    return min(count, adapter_slots(source.adapter_slot_bytes // ranks, limits, memory_of(device).after(weights)))


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


def _warm_up(built: LoadedEngine, source: ModelSource, limits: RunConfig, switches: Switches) -> bool:
    """Compile the kernels of plain steps, if Triton runs the model; returns whether they are compiled."""
    engine, runner = built.engine, built.engine.runner
    if not isinstance(runner, TritonRunner):
        return False
    tokens, width = engine.max_num_batched_tokens, runner.slots.width
    # Triton compiles for widths that are multiples of 16, and for others.
    slots = 0 if runner.adapters is None else runner.adapters.count
    of_model = source.config, source.dtype, source.quantization.identity, source.adapter_ranks, slots
    shape = *of_model, switches, limits.sampler, engine.max_num_seqs, built.block_size, limits.speculative
    forces = engine.scheduler.planner.forces > 0
    queries = QUERIES if isinstance(engine.drafter, WindowDrafter) else ()
    return compile_for(
        lambda: runner.warm_up(tokens, forces=forces, queries=queries), (*shape, tokens, width % 16 == 0)
    )
