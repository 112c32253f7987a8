"""From what the command line asks for to an engine and a tokenizer that are ready to run."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

import torch

from rosebatch.config import EngineConfig, Sampler
from rosebatch.engine.engine import Engine
from rosebatch.engine.load import load_engine, pick_device
from rosebatch.errors import FlagError
from rosebatch.model.source import LoadFormat, ModelSource, find_model
from rosebatch.text.tokenizer import Tokenizer
from rosebatch.toggles import Toggles


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """What decides how an engine is built; ``toggles`` holds True, False or None for each switch."""

    model: str | None = None
    load_format: LoadFormat = "auto"
    device: str = "auto"
    dtype: str = "auto"
    sampler: Sampler = "rosebatch"
    limits: EngineConfig = field(default_factory=EngineConfig)
    toggles: Mapping[str, bool | None] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What was decided before anything is loaded, and the seconds that it took: converting a GGUF file is in them."""

    options: LaunchOptions
    device: torch.device
    toggles: Toggles
    source: ModelSource
    seconds: float


@dataclass(frozen=True, slots=True)
class Launched:
    """A running engine.

    Attributes:
        tokenizer: None for a model without one, which works on token ids.
        description: model, device, sampler, limits and switches as they were decided, for the report.
        load_seconds: what it took, imports left out.
    """

    engine: Engine
    tokenizer: Tokenizer | None
    description: dict[str, Any]
    load_seconds: float


def launch(options: LaunchOptions) -> Launched:
    """Find and load the model, build the engine.

    Raises:
        UserError: something that was asked for is missing, unreadable or impossible.
    """
    return carry_out(plan_launch(options))


def plan_launch(options: LaunchOptions) -> LaunchPlan:
    """Find the model and decide on device, dtype and switches.

    Raises:
        UserError: as ``launch``.
    """
    started = time.perf_counter()
    device = pick_device(options.device)
    toggles = resolve_switches(options, device.type)
    source = find_model(options.model, options.load_format, options.dtype, device)
    return LaunchPlan(options, device, toggles, source, time.perf_counter() - started)


def carry_out(plan: LaunchPlan) -> Launched:
    """Load the model, build the engine.

    Raises:
        UserError: as ``launch``.
    """
    started = time.perf_counter()
    options, device, toggles, source = plan.options, plan.device, plan.toggles, plan.source
    tokenizer = None if source.folder is None else Tokenizer.load(source.folder)
    loaded = load_engine(source, options.limits, toggles, device, options.sampler)
    description = {
        "model": source.name,
        "load_format": source.load_format,
        "device": device.type,
        "dtype": str(source.dtype).removeprefix("torch."),
        "sampler": options.sampler,
        "max_model_len": source.config.max_model_len,
        "max_sequence_len": loaded.engine.max_model_len,
        "max_num_seqs": options.limits.max_num_seqs,
        "max_num_batched_tokens": loaded.engine.scheduler.max_num_batched_tokens,
        "block_size": loaded.block_size,
        "kv_cache_blocks": loaded.num_blocks,
        "kv_cache_bytes": loaded.kv_cache_bytes,
        "toggles": asdict(toggles),
    }
    return Launched(loaded.engine, tokenizer, description, plan.seconds + time.perf_counter() - started)


def resolve_switches(options: LaunchOptions, device: str) -> Toggles:
    """The switches of a run on ``device``; any sampler but ours stands outside of the graph.

    Raises:
        FlagError: a switch or the sampler that was asked for cannot be had.
    """
    if options.sampler == "rosebatch":
        return Toggles.resolve(options.toggles, device)
    flag = f"--sampler {options.sampler}"
    if device != "cuda":
        raise FlagError(f"{flag} has no meaning on {device}: leave it out or choose another --device")
    if find_spec("flashinfer") is None:
        raise FlagError(f"{flag}: the package is not installed; pip install 'rosebatch[flashinfer]'")
    if options.toggles.get("fused_sampler"):
        raise FlagError(f"--fused-sampler is rosebatch's own: leave it or {flag} out")
    return Toggles.resolve({**options.toggles, "fused_sampler": False}, device)
