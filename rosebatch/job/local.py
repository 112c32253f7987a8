"""A job in this process: one engine serves all of its rows."""

import hashlib
import platform
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

from rosebatch.config.byte_sizes import in_bytes
from rosebatch.config.run import RunConfig
from rosebatch.core.errors import UserError
from rosebatch.core.version import __version__
from rosebatch.engine.metrics.stats import EngineStats
from rosebatch.engine.scheduling.servable import EMBEDS_ONLY
from rosebatch.host.threads import in_background
from rosebatch.io.output import Output
from rosebatch.io.parse import Row
from rosebatch.io.reader import PromptReader
from rosebatch.io.results import Shape
from rosebatch.io.rows import FailedRow
from rosebatch.job.answers import answer_or_failure
from rosebatch.job.check import check_file
from rosebatch.job.model_info import ModelInfo
from rosebatch.job.not_finite import MAX_NOT_FINITE, require_finite
from rosebatch.job.serve import Served as ServedRow
from rosebatch.job.serve import serve
from rosebatch.job.service import Served, Work
from rosebatch.launch.launch import Launched, LaunchPlan, default_sampling, load, plan_launch
from rosebatch.model.sentence_transformers import pooling_or_refusal, prompts_or_none
from rosebatch.model.source import tokenizer_fingerprint
from rosebatch.report.build import peak_memory
from rosebatch.report.progress import Progress
from rosebatch.report.provenance import gpu_name
from rosebatch.report.stopwatch import Stopwatch
from rosebatch.report.tally import Tally


@contextmanager
def in_process(config: RunConfig, *, quiet: bool) -> "Iterator[LocalService]":
    """A service of this process.

    Args:
        config: how to load the model.
        quiet: no progress of a download on stderr.

    Raises:
        UserError: something that was asked for is missing, unreadable or impossible.
    """
    yield LocalService(plan_launch(config, quiet=quiet))


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
        run_rows(
            (row for row in work.reader.rows(work.check) if row.index not in work.output),
            self._launched,
            work.output,
            work.shape,
            work.tally,
            work.progress,
            seed=work.seed,
            return_token_ids=work.return_token_ids,
            check=work.check,
            before_finish=work.reader.require_unchanged,
        )

    def served(self) -> Served:
        """See ``Service``."""
        assert self._launched is not None, "the model is loaded"
        launched = self._launched
        return Served(self._stats, launched.description, launched.load_seconds, peak_memory(), gpu_name())


def model_info_of(plan: LaunchPlan) -> ModelInfo:
    """What a job has to know of a model.

    Raises:
        UserError: a file of the model is unreadable.
    """
    identity = {
        "load_format": plan.source.load_format,
        "tokenizer": _tokenizer(plan),
        "chat_template": _digest(plan.config.chat_template),
        "tool_call_parser": plan.config.tool_call_parser,
        "reasoning_parser": plan.config.reasoning_parser,
        "max_prompt_bytes": in_bytes(plan.config.max_prompt_bytes),
        "dtype": str(plan.source.dtype).removeprefix("torch."),
        "device": plan.device.type,
        "sampler": plan.config.sampler,
        "tensor_parallel_size": plan.config.tensor_parallel_size,
        "toggles": asdict(plan.switches),
        "versions": {
            "rosebatch": __version__,
            "python": platform.python_version(),
            "torch": version("torch"),
            "tokenizers": version("tokenizers"),
        },
    }
    independent = plan.device.type == "cpu" and plan.switches.batch_invariant
    pooling, refusal = pooling_or_refusal(plan.source.folder)
    refused = {} if refusal is None else {"embed": refusal}
    if not plan.source.has_head:
        refused["generate"] = f"{plan.source.name}: {EMBEDS_ONLY}; use rosebatch embed"
    names = sorted(prompts_or_none(plan.source.folder).by_name)
    return ModelInfo(plan.source.name, identity, default_sampling(plan), independent, asdict(pooling), refused, names)


def _tokenizer(plan: LaunchPlan) -> dict[str, str] | None:
    """The tokenizer of ``--tokenizer``; None for the model's own."""
    if plan.config.tokenizer is None or plan.tokenizer_folder is None:
        return None
    return {"name": plan.config.tokenizer, "fingerprint": tokenizer_fingerprint(plan.tokenizer_folder)}


def _digest(path: str | None) -> str | None:
    """SHA-256 of a file's contents; None without one."""
    if path is None:
        return None
    try:
        return hashlib.sha256(Path(path).expanduser().read_bytes()).hexdigest()
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None


def run_rows(
    rows: Iterable[Row | None],
    launched: Launched,
    output: Output,
    shape: Shape,
    tally: Tally,
    progress: Progress,
    *,
    seed: int | None = None,
    return_token_ids: bool = False,
    check: Callable[[], None] = lambda: None,
    before_finish: Callable[[], None] = lambda: None,
) -> None:
    """Serve rows and write each result as soon as it is ready.

    However it ends, the engine is ready for other work then.

    Args:
        rows: those that have no result yet; None says that there is none at the moment.
        launched: the model.
        output: takes the results; it is finished, and closed by the caller.
        shape: how results are written.
        tally: counts them.
        progress: is told of them.
        seed: of the job.
        return_token_ids: add ``token_ids`` to the results.
        check: called before every step; what it raises ends the job there.
        before_finish: called once all rows are served; what it raises keeps the output from appearing.
    """
    writer = _Writer(launched, output, shape, tally, progress, return_token_ids)
    batches = serve(
        launched.engine,
        launched.tokenizer,
        launched.grammars,
        rows,
        seed=seed,
        seconds=tally.host_seconds,
        paused=lambda: output.full,
        check=check,
        max_inflight_bytes=in_bytes(launched.plan.config.max_inflight_bytes),
    )
    with closing(batches):
        for batch in batches:
            writer.write(batch)
            # Else its rows would stay until the next batch has come.
            batch.clear()
    before_finish()
    writer.finish()


@dataclass(frozen=True, slots=True)
class _Writer:
    """Writes finished rows and counts them."""

    launched: Launched
    output: Output
    shape: Shape
    tally: Tally
    progress: Progress
    return_token_ids: bool

    def write(self, batch: Sequence[ServedRow]) -> None:
        """Write what a step finished; from here on, the end of this process costs none of it."""
        with Stopwatch(self.tally.host_seconds, "writing"):
            for served in batch:
                self._write(served)
            self.output.flush()
        require_finite(self.tally, self.output.num_rows, at_least=MAX_NOT_FINITE)

    def finish(self) -> None:
        """All rows are written: make the output visible."""
        require_finite(self.tally, self.output.num_rows)
        with Stopwatch(self.tally.host_seconds, "writing"):
            self.output.finish()

    def _write(self, served: ServedRow) -> None:
        if not isinstance(served, FailedRow):
            told = answer_or_failure(
                served, self.launched.tokenizer, self.shape, return_token_ids=self.return_token_ids
            )
            if not isinstance(told, FailedRow):
                found, line = told
                self.output.add(found.index, line, failed=False)
                self.tally.add_row(served.completions, found.finish_reasons)
                row = served.prepared.row
                self.tally.add_fields(row.ignored, row.unclear)
                self.progress.advance(tokens=found.prompt_tokens if found.embeddings else found.completion_tokens)
                return
            served = told
        self.output.add(served.index, self.shape.failure(served), failed=True)
        self.tally.add_error(served.error)
        self.progress.advance(failed=True)
