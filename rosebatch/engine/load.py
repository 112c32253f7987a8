"""From a model source and limits to an engine that is ready to run."""

from dataclasses import dataclass

import torch

from rosebatch.config import EngineConfig, Sampler
from rosebatch.engine.engine import Engine, StepRunner
from rosebatch.engine.kv_cache import KVCache
from rosebatch.engine.memory import plan_memory
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.scheduler import Scheduler
from rosebatch.engine.torch_runner.runner import Runner
from rosebatch.engine.triton_runner.runner import DeviceRunner
from rosebatch.errors import FlagError
from rosebatch.model.registry import build_model
from rosebatch.model.source import ModelSource
from rosebatch.ops import device_ops, select
from rosebatch.toggles import Toggles

# Tokens of a block: what a GPU reads at a time, and what a prefix on a CPU is rounded down to.
_BLOCK_SIZE = {"cuda": 64, "cpu": 16}
# Decode steps that follow each other before the host looks at their tokens.
_DECODE_WINDOW = 8


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine and what was decided for it."""

    engine: Engine
    num_blocks: int
    block_size: int
    kv_cache_bytes: int


def pick_device(name: str) -> torch.device:
    """``auto``, ``cpu`` or ``cuda`` -> a device.

    Raises:
        FlagError: ``cuda`` was asked for and there is none.
    """
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise FlagError("--device cuda: PyTorch sees no CUDA device here")
    return torch.device("cuda" if name == "cuda" or (name == "auto" and available) else "cpu")


def choose_block_size(limits: EngineConfig, device: torch.device) -> int:
    """Tokens of a block: what was asked for, or what suits the device."""
    return limits.block_size or _BLOCK_SIZE[device.type]


def load_engine(
    source: ModelSource,
    limits: EngineConfig,
    toggles: Toggles,
    device: torch.device,
    sampler: Sampler = "rosebatch",
) -> LoadedEngine:
    """Load the weights, size the KV cache, put the engine together.

    Raises:
        UserError: a weight is missing.
        FlagError: the KV cache has no room for a single block.
    """
    assert sampler == "rosebatch" or not toggles.fused_sampler, "the fused sampler is rosebatch's own"
    config, ops = source.config, select(toggles, device.type, sampler)
    block_size = choose_block_size(limits, device)
    with torch.inference_mode():
        model = build_model(config, ops, source.weights(device))
    memory = plan_memory(config, limits, block_size, source.dtype, device)
    num_blocks = memory.num_blocks
    kernels_only = device.type == "cuda" and toggles.paged_attention
    window = 0
    if kernels_only:
        window = _DECODE_WINDOW if toggles.fused_sampler and toggles.late_results else 1
    # One block more than the scheduler knows of: where kernels write what nobody reads.
    cache = KVCache(config, num_blocks + kernels_only, block_size, source.dtype, device, ops)
    scheduler = Scheduler(
        BlockPool(num_blocks, block_size),
        max_num_seqs=limits.max_num_seqs,
        max_num_batched_tokens=memory.max_num_batched_tokens,
        prefix_cache=toggles.prefix_cache,
        chunked_prefill=toggles.chunked_prefill,
        decode_window=window,
    )
    runner: StepRunner
    if kernels_only:
        runner = DeviceRunner(
            model,
            config,
            cache,
            ops,
            device_ops(
                limits.max_num_seqs,
                config.num_heads,
                config.num_kv_heads,
                config.head_dim,
                device,
                split_keys=toggles.split_keys,
            ),
            toggles,
            max_num_seqs=limits.max_num_seqs,
            max_len=min(config.max_model_len, num_blocks * block_size),
            window=window,
        )
    else:
        runner = Runner(model, config, cache, ops, batched_sampling=toggles.batched_sampling)
    engine = Engine(
        scheduler,
        runner,
        vocab_size=config.vocab_size,
        max_model_len=config.max_model_len,
        eos_token_ids=config.eos_token_ids,
        lookahead=int(kernels_only and toggles.late_results),
    )
    return LoadedEngine(engine, num_blocks, block_size, cache.data.nbytes)
