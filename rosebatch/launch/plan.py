"""What is decided before anything is loaded: the model, its device, its switches, and whether it fits."""

import sys
import time
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

from rosebatch.config.model import ModelConfig
from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches, flag, without_effect
from rosebatch.core.errors import FlagError, UserError
from rosebatch.core.plain import dtype_name
from rosebatch.core.words import counted
from rosebatch.engine.build import choose_block_size
from rosebatch.engine.cache.memory import batched_tokens, memory_of
from rosebatch.engine.images import image_bytes
from rosebatch.engine.load import pick_device, resident_adapters, stacks_adapters
from rosebatch.host.memory import host_memory
from rosebatch.io.row_adapters import RowAdapters
from rosebatch.launch.drafts import require_drafts
from rosebatch.launch.fit import SMALL_IMAGE, Fit, Wanted, find_fit, require_room_for_adapters
from rosebatch.model.fingerprint import tokenizer_fingerprint
from rosebatch.model.hub import parse_hub_id
from rosebatch.model.source import OF_GGUF, ModelSource, find_model, find_tokenizer
from rosebatch.model.vision.vision import Sight, no_images
from rosebatch.ops.device import has_e4m3, unmeasured_sizes
from rosebatch.ops.layout import MatrixBytes
from rosebatch.ops.select import has_invariant_products
from rosebatch.ops.shard import require_divisible
from rosebatch.text.tokenizer import has_tokenizer

# Tokens, of mixers whose tiles begin where a chunk does.
_LONGEST_TILE = 64


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """What is decided before anything is loaded.

    Attributes:
        config: as it was given.
        switches: resolved for the device.
        source: the model.
        tokenizer_folder: None for a .toml of shapes, which works on token ids.
        seconds: spent on deciding; downloading a model or converting a GGUF file counts.
        fit: what it takes of the device; None if that was not looked at.
    """

    config: RunConfig
    device: torch.device
    switches: Switches
    source: ModelSource
    tokenizer_folder: Path | None
    seconds: float
    fit: Fit | None = None

    @property
    def quantization(self) -> str | None:
        """How the matrices of layers are kept, for people; None for plain floats."""
        source, has_experts = self.source, self.source.config.experts is not None
        return source.quantization.described(self.switches, self.device.type, source.dtype, has_experts=has_experts)

    @property
    def matrix_bytes(self) -> MatrixBytes:
        """What they take."""
        source = self.source
        return source.quantization.kept(self.switches, self.device.type, source.dtype)

    @property
    def sight(self) -> Sight:
        """How the model sees, or why it does not."""
        found, given = self.source.sight, self.config.model
        if not isinstance(found, str) or self.source.load_format == "dummy":
            return found
        if given is None:
            return "no --model was given, and the demo model is one of text"
        # It is converted to a folder.
        return OF_GGUF if given.endswith(".gguf") else found

    @property
    def row_adapters(self) -> RowAdapters:
        """What rows may name."""
        own = (self.source.name, self.config.model)
        return RowAdapters(
            tuple(adapter.name for adapter in self.source.adapters), tuple(name for name in own if name is not None)
        )

    @property
    def no_images(self) -> str | None:
        """Why no row may have images; None if rows may."""
        if isinstance(self.sight, str):
            return no_images(self.sight)
        return "--limit-images 0 allows no row an image" if self.config.limit_images == 0 else None

    @property
    def dependence(self) -> str | None:
        """What lets a row's bits depend on the rows beside it; None if nothing does."""
        if not self.switches.batch_invariant:
            return flag("batch_invariant", on=False)
        on_cpu, dtype = self.device.type == "cpu", self.source.dtype
        # Shorter chunks end where the budget does, and cached prefixes do not.
        chunk = self.config.max_num_batched_tokens
        least = max(_LONGEST_TILE, choose_block_size(self.config, self.device))
        causes = {
            f"{dtype_name(dtype)} on this CPU": on_cpu and not has_invariant_products(dtype),
            flag("paged_attention", on=False): not on_cpu and not self.switches.paged_attention,
            f"--sampler {self.config.sampler}": self.config.sampler != "rosebatch",
            f"--max-num-batched-tokens {chunk}, below {least}": not on_cpu and chunk is not None and chunk < least,
            "transformers' code of the model": self.source.model_impl != "rosebatch",
        }
        return next((cause for cause, is_there in causes.items() if is_there), None)

    def tokenizer_identity(self) -> dict[str, str] | None:
        """Name and fingerprint of the tokenizer of ``--tokenizer``; None for the model's own."""
        if self.config.tokenizer is None or self.tokenizer_folder is None:
            return None
        return {"name": self.config.tokenizer, "fingerprint": tokenizer_fingerprint(self.tokenizer_folder)}


def plan_fitting(config: RunConfig, *, quiet: bool = False, weights: bool = True) -> LaunchPlan:
    """``plan_launch`` of a model that fits the device, which is found before its weights are downloaded or converted.

    Args:
        config: of the run.
        quiet: no progress of a download on stderr.
        weights: whether they are needed; else those of a Hub model are not downloaded.

    Raises:
        UserError: as ``launch``.
    """
    started = time.perf_counter()
    plan = plan_launch(config, quiet=quiet, weights=False)
    source, gpus = plan.source, torch.cuda.device_count()
    block_size = choose_block_size(config, plan.device)
    tokens = batched_tokens(config, plan.device.type)
    slots = resident_adapters(source, config, plan.switches, plan.device)
    stacks = stacks_adapters(plan.switches, plan.device)
    if stacks and slots < len(source.by_row):
        require_room_for_adapters(len(source.by_row), source.adapter_slot_bytes, host_memory().free)
    smaller = replace(config, max_pixels=min(config.max_pixels or SMALL_IMAGE, SMALL_IMAGE))
    wanted = Wanted(
        source.name,
        source.config,
        source.dtype,
        block_size,
        config,
        plan.switches,
        gpus,
        source.quantization,
        image_bytes(source, config, tokens),
        image_bytes(source, smaller, tokens),
        0 if source.head is None else source.head.num_weights,
        source.draft_planes,
        slots * source.adapter_slot_bytes if stacks else source.adapter_bytes,
        len(source.by_row),
        slots,
    )
    fit = find_fit(wanted, memory_of(plan.device))
    if weights or config.model is None or parse_hub_id(config.model) is None:
        try:
            source.keep_state()
        except UserError:
            # They are missing, to be downloaded or to be converted.
            plan = plan_launch(config, quiet=quiet)
    return replace(plan, fit=fit, seconds=time.perf_counter() - started)


def plan_launch(config: RunConfig, *, quiet: bool = False, weights: bool = True) -> LaunchPlan:
    """Find the model; decide on device, dtype and switches.

    Args:
        config: of the run.
        quiet: no progress of a download on stderr.
        weights: see ``plan_fitting``.

    Raises:
        UserError: as ``launch``.
    """
    started = time.perf_counter()
    device = pick_device(config.device)
    switches = resolve_switches(config, device.type)
    for sentence in without_effect(config.switches, switches, device.type):
        warn_once(sentence)
    if (sentence_of_sizes := unmeasured_sizes(device)) is not None:
        warn_once(sentence_of_sizes)
    source = find_model(config, device, quiet=quiet, weights=weights)
    require_drafts(source, config, switches, device)
    if weights:
        source.keep_state()
    folder = source.folder
    if config.tokenizer is not None:
        folder = find_tokenizer(config.tokenizer, quiet=quiet)
        if not has_tokenizer(folder):
            raise UserError(f"--tokenizer {config.tokenizer}: has no tokenizer")
    if (ranks := config.tensor_parallel_size) > 1:
        require_divisible(source.config, ranks)
        if device.type == "cuda" and (count := torch.cuda.device_count()) < ranks:
            raise FlagError(f"--tensor-parallel-size {ranks}: this process sees {counted(count, 'GPU')}")
    if config.kv_cache_dtype == "fp8" and switches.paged_attention and not has_e4m3(device):
        raise FlagError("--kv-cache-dtype fp8: its kernels need a GPU of Ada (compute capability 8.9) or newer")
    for name, reason in idle_switches(source, switches, device.type).items():
        if config.switches.get(name):
            warn_once(f"{flag(name)} has no effect: {reason}")
    switches = replace(switches, **dict.fromkeys(switched_off_by(source.config, switches), False))
    plan = LaunchPlan(config, device, switches, source, folder, time.perf_counter() - started)
    if config.switches.get("batch_invariant") and plan.dependence is not None:
        warn_once(f"--batch-invariant: with {plan.dependence}, results may still depend on the batch")
    return plan


@cache
def warn_once(sentence: str) -> None:
    """Once a process: a comparison launches two engines, a session many."""
    sys.stderr.write(f"rosebatch: warning: {sentence}\n")


def idle_switches(source: ModelSource, switches: Switches, device: str) -> dict[str, str]:
    """Switches that change nothing for a model, and why."""
    idle, has_experts = switched_off_by(source.config, switches), source.config.experts is not None
    reason = source.quantization.why_none_stays(switches, device, source.dtype, has_experts=has_experts)
    return idle if reason is None else {**idle, "quantized_linear": reason}


def switched_off_by(model: ModelConfig, switches: Switches) -> dict[str, str]:
    """Switches that a model cannot have beside the others, and why."""
    if model.bidirectional:
        whole = "tokens see those after them: prompts are computed whole, and nothing is kept of them"
        return dict.fromkeys(("prefix_cache", "chunked_prefill"), whole)
    if not model.num_state_layers or switches.chunked_prefill:
        return {}
    return {"prefix_cache": "layers of this model keep states, which prompts share where their chunks end"}


def resolve_switches(config: RunConfig, device: str) -> Switches:
    """The switches of a run on ``device``; other samplers run outside of the graph.

    Raises:
        FlagError: a switch or the sampler cannot be had there.
    """
    if config.sampler == "rosebatch":
        return Switches.resolve(config.switches, device)
    sampler = f"--sampler {config.sampler}"
    if device != "cuda":
        raise FlagError(f"{sampler} has no meaning on {device}: leave it out or choose another --device")
    if find_spec("flashinfer") is None:
        raise FlagError(f"{sampler}: the package is not installed; pip install 'rosebatch[flashinfer]'")
    if config.switches.get("fused_sampler"):
        raise FlagError(f"--fused-sampler is rosebatch's own: leave it or {sampler} out")
    return Switches.resolve({**config.switches, "fused_sampler": False}, device)
