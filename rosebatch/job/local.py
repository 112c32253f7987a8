"""A job in this process: one engine serves all of its rows."""

import hashlib
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from rosebatch.config.byte_sizes import in_bytes
from rosebatch.config.run import RunConfig
from rosebatch.core.errors import UserError
from rosebatch.core.plain import dtype_name
from rosebatch.core.version import __version__
from rosebatch.engine.metrics.stats import EngineStats
from rosebatch.host.threads import in_background
from rosebatch.io.reader import PromptReader
from rosebatch.io.tasks.registry import refusals
from rosebatch.job.check import check_file
from rosebatch.job.model_info import ModelInfo
from rosebatch.job.report.build import peak_memory
from rosebatch.job.report.provenance import gpu_name
from rosebatch.job.run_rows import run_rows
from rosebatch.job.service import Served, Work
from rosebatch.launch.launch import Launched, default_sampling, load
from rosebatch.launch.plan import LaunchPlan, plan_fitting
from rosebatch.text.tokenizer import read_template


@contextmanager
def in_process(config: RunConfig, *, quiet: bool) -> "Iterator[LocalService]":
    """A service of this process.

    Args:
        config: how to load the model.
        quiet: no progress of a download on stderr.

    Raises:
        UserError: something that was asked for is missing, unreadable or impossible.
    """
    yield LocalService(plan_fitting(config, quiet=quiet))


class LocalService:
    """See ``rosebatch.job.service.Service``."""

    places: Sequence[str] = ()

    def __init__(self, plan: LaunchPlan, launched: Launched | None = None) -> None:
        self.facts = model_info_of(plan)
        self._plan = plan
        self._launched = launched
        self._stats = EngineStats()

    def fingerprint(self) -> Callable[[], str]:
        """See ``Service``."""
        return in_background(self._plan.source.fingerprint)

    def count_bad(self, reader: PromptReader) -> int:
        """See ``Service``."""
        return check_file(reader, self._plan, sys.stderr, strict=True).errors.total()

    def load(self) -> None:
        """See ``Service``."""
        self._launched = self._launched or load(self._plan)

    def run(self, work: Work) -> None:
        """See ``Service``."""
        assert self._launched is not None, "the model is loaded"
        self._stats = self._launched.engine.restart_stats()
        if self.facts.shares_prefixes:
            work.sort_rows(in_bytes(self._plan.config.max_inflight_bytes))
        # No loop, whose variable would hold a row while the next one is parsed.
        rows = filter(lambda row: row.index not in work.output, work.reader.rows(work.check))
        work.run(run_rows(rows, self._launched, work.serving, work.output, work.tally, work.progress, work.check))

    def served(self) -> Served:
        """See ``Service``."""
        assert self._launched is not None, "the model is loaded"
        launched = self._launched
        return Served(self._stats, launched.description, launched.load_seconds, peak_memory(), gpu_name())


def model_info_of(plan: LaunchPlan) -> ModelInfo:
    """What a job needs of a model before it is loaded.

    Raises:
        UserError: a file of the model is unreadable.
    """
    identity = {
        "load_format": plan.source.load_format,
        "tokenizer": plan.tokenizer_identity(),
        "chat_template": _template_digest(plan.config.chat_template),
        "tool_call_parser": plan.config.tool_call_parser,
        "reasoning_parser": plan.config.reasoning_parser,
        "max_prompt_bytes": in_bytes(plan.config.max_prompt_bytes),
        "dtype": dtype_name(plan.source.dtype),
        "quantization": plan.source.quantization.identity,
        "kv_cache_dtype": plan.source.config.kv_cache_dtype,
        "device": plan.device.type,
        # Another GPU may add in another order; without the switch, the batch decides that anyway.
        "gpu": gpu_name() if plan.device.type == "cuda" and plan.switches.batch_invariant else None,
        "sampler": plan.config.sampler,
        "tensor_parallel_size": plan.config.tensor_parallel_size,
        # Left out where they are not given: older runs have none.
        **({"lora": adapters} if (adapters := plan.source.adapter_names) else {}),
        **{name: value for name in ("limit_images", "max_pixels") if (value := getattr(plan.config, name)) is not None},
        "toggles": asdict(plan.switches),
        "versions": {
            "rosebatch": __version__,
            "python": platform.python_version(),
            "torch": version("torch"),
            "tokenizers": version("tokenizers"),
        },
    }
    pooling = plan.source.pooling
    refused = refusals(plan.source.name, pooling, has_head=plan.source.has_head, no_images=plan.no_images)
    names = sorted(plan.source.prompts.by_name)
    return ModelInfo(
        plan.source.name,
        identity,
        default_sampling(plan),
        plan.dependence is None,
        asdict(pooling.params),
        refused,
        names,
        plan.source.vector_size,
        plan.switches.prefix_cache,
        fit=str(plan.fit or ""),
    )


def _template_digest(path: str | None) -> str | None:
    """SHA-256 of the user's chat template, which is valid; None without one."""
    if path is None:
        return None
    file = Path(path).expanduser()
    try:
        content = file.read_bytes()
    except OSError as error:
        raise UserError(f"--chat-template {path}: {error.strerror}") from None
    read_template(file)
    return hashlib.sha256(content).hexdigest()
