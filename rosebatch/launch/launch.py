"""From a run's config to an engine and a tokenizer that are ready to run."""

import os
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from rosebatch.config.byte_sizes import in_bytes
from rosebatch.config.model import ModelConfig
from rosebatch.config.run import RunConfig
from rosebatch.core.plain import dtype_name
from rosebatch.engine.build import LoadedEngine
from rosebatch.engine.cache.memory import KVGroup
from rosebatch.engine.cache.windows import blocks_of_window
from rosebatch.engine.engine import Engine
from rosebatch.engine.load import load_engine
from rosebatch.engine.step_runner import StepRunner
from rosebatch.engine.triton_runner.runner import TritonRunner
from rosebatch.launch.plan import LaunchPlan, plan_fitting, switched_off_by, warn_once
from rosebatch.model.hf.generation_config import sampling_defaults, unserved_defaults
from rosebatch.ops.shard import Shard
from rosebatch.text.grammar.check import GrammarLimits
from rosebatch.text.grammar.grammars import Grammars
from rosebatch.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Launched:
    """A running engine.

    Attributes:
        tokenizer: None for a model without one, which works on token ids.
        grammars: compiles what completions have to match; None without a tokenizer.
        description: for the report: model, device, sampler, limits and switches as decided.
        load_seconds: without the imports before it.
        is_compiled: whether the kernels of plain steps are compiled already.
    """

    plan: LaunchPlan
    engine: Engine
    tokenizer: Tokenizer | None
    grammars: Grammars | None
    description: dict[str, Any]
    load_seconds: float
    is_compiled: bool = False


def launch(config: RunConfig) -> Launched:
    """Find and load the model, build the engine.

    Raises:
        UserError: something that was asked for is missing, unreadable or impossible.
    """
    return load(plan_fitting(config))


def load_tokenizer(plan: LaunchPlan) -> Tokenizer | None:
    """The tokenizer of a run; None for a model that works on token ids.

    Raises:
        UserError: it is unreadable.
    """
    if plan.tokenizer_folder is None:
        return None
    template = plan.config.chat_template
    return Tokenizer.load(
        plan.tokenizer_folder,
        None if template is None else Path(template).expanduser(),
        in_bytes(plan.config.max_prompt_bytes),
        reasoning_parser=plan.config.reasoning_parser,
        tool_call_parser=plan.config.tool_call_parser,
        prompts=plan.source.prompts,
    )


def default_sampling(plan: LaunchPlan) -> dict[str, Any]:
    """The model's own sampling defaults, as fields of a row; empty unless ``generation_config`` is ``auto``.

    Raises:
        UserError: they are unreadable.
    """
    if plan.config.generation_config == "none" or plan.source.folder is None:
        return {}
    if names := unserved_defaults(plan.source.folder):
        warn_once(f"generation_config.json of {plan.source.name}: not served: {', '.join(names)}")
    return sampling_defaults(plan.source.folder)


def make_grammars(tokenizer: Tokenizer, model: ModelConfig, config: RunConfig) -> Grammars:
    """What compiles grammars for a model; cheap until it is used."""
    return Grammars(tokenizer, model.vocab_size, model.eos_token_ids, grammar_limits(config))


def grammar_limits(config: RunConfig) -> GrammarLimits:
    """What compiling one grammar may take."""
    return GrammarLimits(config.grammar_timeout, in_bytes(config.grammar_memory))


def load(plan: LaunchPlan) -> Launched:
    """Load the model, build the engine.

    Raises:
        UserError: as ``launch``.
    """
    started = time.perf_counter()
    config, source, switches = plan.config, plan.source, plan.switches
    if plan.device.type == "cpu" and switches.batch_invariant:
        # MKL reads this at its first product. Without it the last bits of a product depend on where its operands lie
        # in memory, on some processors.
        os.environ.setdefault("MKL_CBWR", "AUTO")
    tokenizer = load_tokenizer(plan)
    loaded = (
        _load_tensor_parallel(plan)
        if config.tensor_parallel_size > 1
        else load_engine(source, config, switches, plan.device)
    )
    if loaded.waits is not None and switches.cuda_graph:
        warn_once(f"no CUDA graphs, because the model waits for the host: {loaded.waits}")
        switches = replace(switches, cuda_graph=False)
    description = {
        "model": source.name,
        "is_demo_model": config.model is None,
        "load_format": source.load_format,
        "model_impl": source.model_impl,
        "lora": source.adapter_names or None,
        "max_loras": loaded.engine.scheduler.planner.adapters.slots or len(source.by_row) or None,
        "speculative": config.speculative,
        "speculative_model": config.speculative_model,
        "device": plan.device.type,
        "tensor_parallel_size": config.tensor_parallel_size,
        "dtype": dtype_name(source.dtype),
        "quantization": plan.quantization,
        "sampler": config.sampler,
        "max_model_len": source.config.max_model_len,
        "max_sequence_len": loaded.engine.max_model_len,
        "max_num_seqs": loaded.engine.max_num_seqs,
        "max_num_batched_tokens": loaded.engine.max_num_batched_tokens,
        "block_size": loaded.block_size,
        "kv_cache_dtype": "fp8" if source.config.kv_cache_dtype == "fp8" else dtype_name(source.dtype),
        "kv_cache_blocks": loaded.num_blocks,
        "kv_cache_bytes": loaded.kv_cache_bytes,
        "kv_cache_groups": [_describe_group(group, loaded.block_size) for group in loaded.groups],
        "toggles": asdict(switches),
        "switched_off_by_model": switched_off_by(source.config, plan.switches),
    }
    grammars = None if tokenizer is None else make_grammars(tokenizer, source.config, config)
    seconds = plan.seconds + time.perf_counter() - started
    return Launched(plan, loaded.engine, tokenizer, grammars, description, seconds, loaded.is_compiled)


def _load_tensor_parallel(plan: LaunchPlan) -> LoadedEngine:
    """The engine of rank 0, whose plans the other ranks compute as well."""
    from rosebatch.launch.driver import DriverRunner, Ranks
    from rosebatch.launch.group import TorchGroup, new_store, open_store

    size = plan.config.tensor_parallel_size
    path, remove = new_store()
    store = open_store(path, size)
    ranks = Ranks(plan.config, path, plan.source.state)
    ranks.at_end(remove)
    split_threads(plan)
    ranks.await_ready()
    group = TorchGroup(Shard(0, size), store, plan.device)
    ranks.on_loss(group.abandon)
    ranks.at_end(group.close)

    def drive(own: StepRunner) -> StepRunner:
        if isinstance(own, TritonRunner):
            # Before the group: NCCL ends after the last graph that holds its kernels.
            ranks.at_end(own.release)
        return DriverRunner(own, ranks.send, ranks.explain, ranks.require_all)

    try:
        return load_engine(plan.source, plan.config, plan.switches, plan.device, group, drive)
    except RuntimeError as error:
        ranks.explain(error)


def split_threads(plan: LaunchPlan) -> None:
    """Let the processes that hold a model together share the cores."""
    if plan.device.type == "cpu":
        torch.set_num_threads(max(1, torch.get_num_threads() // plan.config.tensor_parallel_size))


def _describe_group(group: KVGroup, block_size: int) -> dict[str, int]:
    """With the tokens that its blocks hold, and the sequences: those of any length if it has a window."""
    described = {**group._asdict(), "tokens": group.blocks * block_size}
    if group.window:
        described["sequences"] = group.blocks // blocks_of_window(group.window, block_size)
    return described
