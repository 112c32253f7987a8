"""The whole job: a file of prompts in, a file of completions and a report out."""

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from rosebatch.config.byte_sizes import in_bytes
from rosebatch.config.run import DEMO_ANSWERS, RunConfig
from rosebatch.core.errors import (
    ChangedInputError,
    FailedRunError,
    FlagError,
    InterruptionError,
    LostProcessError,
    UserError,
    printable,
)
from rosebatch.core.words import counted
from rosebatch.host.paths import may_reach_terminal
from rosebatch.io.openai.lines import BatchShape
from rosebatch.io.output import Output
from rosebatch.io.reader import PromptReader
from rosebatch.io.results import PlainShape, Shape
from rosebatch.io.sampling_fields import with_defaults
from rosebatch.job.config import JobConfig
from rosebatch.job.destination import Destination, find_destination
from rosebatch.job.manifest import build_manifest
from rosebatch.job.model_info import ModelInfo
from rosebatch.job.open_input import open_input, require_free_names
from rosebatch.job.open_output import errors_of, open_output
from rosebatch.job.output_manifest import OutputManifest, find_output_manifest, told_replaced
from rosebatch.job.report.build import build_report, write_report
from rosebatch.job.report.progress import Progress
from rosebatch.job.report.table import print_report
from rosebatch.job.report.tally import Tally
from rosebatch.job.sampling_defaults import check_sampling
from rosebatch.job.serve_options import ServeOptions
from rosebatch.job.service import Loaded, Served, Service, Work
from rosebatch.job.shard import Shard
from rosebatch.text.grammar.check import GrammarLimits

# While it is entered, signals end the job where it may end: at each call of what it gives. It is told how to find out
# where the results so far are.
Listen = Callable[[Callable[[], str]], AbstractContextManager[Callable[[], None]]]


@dataclass(frozen=True, slots=True)
class JobResult:
    """What a job did.

    Attributes:
        num_failed: rows that failed, those of a resumed run included.
        report: everything else, see ``docs/reports.md``. Empty if the output was finished already, or the input has
            no rows.
    """

    num_failed: int
    report: Mapping[str, Any]


@contextmanager
def _no_signals(kept: Callable[[], str]) -> Iterator[Callable[[], None]]:
    yield lambda: None


def run_job(
    job: JobConfig, model: RunConfig | Loaded, *, listen: Listen = _no_signals, started: float | None = None
) -> JobResult:
    """``run_file`` with its parameters as configs.

    Args:
        job: files, sampling defaults, resuming.
        model: how to load one, or one that is loaded.
        listen: how signals reach the job.
        started: when the process began, on the clock of ``time.perf_counter``, for the report.
    """
    limits = None
    if isinstance(model, RunConfig):
        limits = GrammarLimits(model.grammar_timeout, in_bytes(model.grammar_memory))
        model = job.limits(model)
    check_sampling(job.sampling, job.seed, limits)
    if job.strict and isinstance(model, RunConfig) and model.ray is not None:
        raise FlagError("--strict with --ray is not supported: another machine may lack the input; use rosebatch check")
    # Read before the model is looked for: a missing file is the likelier mistake.
    reader = open_input(job)
    shard = None if job.shard is None else Shard.parse(job.shard)
    if shard is not None:
        reader.serves = shard.has
    destination = find_destination(job, reader, model if isinstance(model, RunConfig) else None)
    require_free_names(reader)
    making = _service(model, quiet=job.quiet)
    imported = time.perf_counter()
    with making as service:
        if not reader.is_batch:
            facts = service.facts
            job.task.require_able(facts.refused, facts.prompt_names, facts.hidden_size, reader.columns)
        if own := service.facts.sampling:
            job = replace(job, sampling=with_defaults(job.sampling, own))
            reader.defaults = job.sampling
        if job.strict:
            _require_all_good(reader, service)
        _require_flags_apply(job, reader, destination)

        def manifest(digest: str | None) -> Callable[[], dict[str, Any]]:
            facts, wait = service.facts, service.fingerprint()
            return build_manifest(job, facts, wait, digest, input_format=reader.kind, columns=reader.columns)

        output = destination.output
        if shard is None:
            if job.resume and not job.force_resume:
                errors = errors_of(destination, reader)
                found = find_output_manifest(output, errors, job.rows_per_file, lambda: manifest(reader.digest())())
                if found is not None:
                    return _already_finished(job, found)
            if not job.quiet and (told := told_replaced(output)):
                sys.stderr.write(f"rosebatch: {told}\n")
        results = open_output(job, destination, reader, manifest, shard)
        resumed = results.num_rows
        if not job.quiet:
            _tell_of_lines(destination)
        if isinstance(model, RunConfig) and not job.quiet:
            if model.model is None:
                sys.stderr.write(f"rosebatch: no --model given: {DEMO_ANSWERS}\n")
            sys.stderr.write(f"rosebatch: {service.facts.name} {service.facts.fit}\n")
        if isinstance(model, RunConfig) and (reader.is_empty or (resumed and resumed == _total(reader, shard))):
            return _without_model(job, reader, results)
        tally, begun = _serve(job, reader, service, results, shard, listen)
        served = service.served()
    startup = {} if started is None else {"import": imported - started}
    startup["load"] = served.load_seconds
    if served.stats.first_token_time is not None:
        startup["first token"] = served.stats.first_token_time - begun
    report = build_report(
        tally,
        served.stats,
        {
            **served.description,
            "sampling": dict(job.sampling),
            **job.task.description(service.facts.pooling, service.facts.refused),
        },
        startup,
        time.perf_counter() - begun,
        resumed,
        resumed_exactly=not resumed or (_is_exact(job, service.facts) and not results.mixed),
        input=job.input,
        output=job.output or "-",
        machine=_machine(served),
    )
    if not job.quiet:
        print_report(report, sys.stderr)
        if shard is not None:
            sys.stderr.write(
                f"shard {shard}: {counted(results.num_rows, 'row')}; once all shards have run: rosebatch merge\n"
            )
    for path in job.report:
        write_report(report, path)
    return JobResult(results.num_failed, report)


def _is_exact(job: JobConfig, facts: ModelInfo) -> bool:
    """Whether a row has the same bits in any batch. What a GPU pools goes by the chunks of a prompt."""
    return facts.independent and (job.task.samples or facts.identity["device"] == "cpu")


def _serve(
    job: JobConfig, reader: PromptReader, service: Service, results: Output, shard: Shard | None, listen: Listen
) -> tuple[Tally, float]:
    """Load the model and serve all rows; returns their counts, and when that began.

    Raises:
        InterruptionError: a signal ended the job.
        UserError: it is impossible, or it fails.
    """
    tally, resumed = Tally(), results.num_rows
    begun: float | None = None
    try:
        service.load()
        # This may wait for the hash of the weights. Here a signal ends the wait at once.
        created = results.created
        begun = time.perf_counter()
        total = None if job.quiet else _total(reader, shard)
        with (
            listen(lambda: results.kept) as check,
            Progress(
                total,
                resumed=resumed,
                enabled=not job.quiet,
                bar=not may_reach_terminal(job.output if job.output not in (None, "-") else "/dev/stdout"),
                places=service.places,
                counts=job.task.counts,
                doing=job.task.doing,
            ) as progress,
        ):
            shape = _shape(job, reader, service, created)
            serving = ServeOptions(shape, job.seed, return_token_ids=job.return_token_ids, media=reader.media)
            service.run(Work(reader, results, serving, tally, progress, check))
    except InterruptionError as interrupted:
        results.flush()
        raise InterruptionError(interrupted.number, results.kept) from None
    except (LostProcessError, ChangedInputError) as error:
        results.flush()
        raise FailedRunError(f"{error}{results.kept}") from None
    except UserError as error:
        if begun is not None:
            error.exit_code = FailedRunError.exit_code
        raise
    finally:
        results.close()
    return tally, begun


def _shape(job: JobConfig, reader: PromptReader, service: Service, created: int) -> Shape:
    """How results are written."""
    if reader.is_batch:
        return BatchShape(service.facts.name, created, job.echo_model)
    return PlainShape(job.result_column, job.task.result)


def _machine(served: Served) -> dict[str, Any]:
    """Fields of the report from whoever served the rows."""
    fields = {"gpu": served.gpu, "peak_memory_bytes": dict(served.peak_memory)}
    return {**fields, "workers": [*served.workers]} if served.workers else fields


def _service(model: RunConfig | Loaded, *, quiet: bool) -> AbstractContextManager[Service]:
    """Who serves the job: this process if it has the model or is to have it, else others."""
    if not isinstance(model, RunConfig):
        return model.service()
    if model.data_parallel_size != 1 or model.ray is not None:
        from rosebatch.job.workers.service import in_workers

        return in_workers(model, quiet=quiet)
    # Only now, since it imports PyTorch.
    from rosebatch.job.local import in_process

    return in_process(model, quiet=quiet)


def _already_finished(job: JobConfig, found: OutputManifest) -> JobResult:
    mixed = "; --force-resume made it of several runs" if found.mixed else ""
    rows = f"{counted(found.rows, 'row')}, {found.failed} failed"
    return _without_report(job, f"{job.output} is already finished: {rows}, nothing to do{mixed}", found.failed)


def _without_report(job: JobConfig, told: str, num_failed: int) -> JobResult:
    """The result of a job that has nothing to serve; ``told`` says why."""
    if not job.quiet:
        sys.stderr.write(f"rosebatch: {told}{'; no report is written' if job.report else ''}\n")
    return JobResult(num_failed, {})


def _tell_of_lines(destination: Destination) -> None:
    """Say which files are JSONL though their names do not say so."""
    for target in filter(None, (destination.output, destination.errors)):
        if target.says_other_than_lines:
            others = "; .parquet, .arrow, .csv or a / at the end ask for others" * (target is destination.output)
            sys.stderr.write(f"rosebatch: {target.name} is written as JSONL, an object on each line{others}\n")


def _total(reader: PromptReader, shard: Shard | None) -> int | None:
    """The rows that the job has, if that can be known."""
    count = reader.count()
    return count if shard is None or count is None else shard.size(count)


def _without_model(job: JobConfig, reader: PromptReader, results: Output) -> JobResult:
    """The end of a job that has no rows, or was interrupted behind its last one: no model is loaded for it."""
    try:
        reader.require_unchanged()
        results.finish()
    finally:
        results.close()
    told = f"{printable(reader.source)} has no rows: the output is empty"
    if results.num_rows:
        rows = f"{counted(results.num_rows, 'row')}, {results.num_failed} failed"
        told = f"all rows were done before ({rows}): nothing is computed"
    return _without_report(job, told, results.num_failed)


def _require_flags_apply(job: JobConfig, reader: PromptReader, destination: Destination) -> None:
    """Check that no flag was given that means nothing for these files."""
    job.task.require_applies(is_batch=reader.is_batch, to_table=destination.to_table)
    if job.echo_model and not reader.is_batch:
        raise FlagError("--echo-model has no meaning without an OpenAI batch: no other row names a model")
    given = {
        "--result-column": job.result_column,
        "--prompt-column": reader.columns.prompt,
        "--id-column": reader.columns.id,
        "--columns": reader.columns.carried,
        "--prompt-template": reader.columns.template,
        "--system-prompt": reader.columns.system,
        "--keep-prompt": reader.columns.keeps_prompt or None,
    }
    flag = next((name for name, value in given.items() if value is not None), None)
    if reader.is_batch and flag is not None:
        raise FlagError(f"{flag} has no meaning for an OpenAI batch: its answers have a form of their own")


def _require_all_good(reader: PromptReader, service: Service) -> None:
    if reader.source == "-":
        raise FlagError("--strict needs an input file: stdin can be read once only")
    bad = service.count_bad(reader)
    if bad:
        raise FlagError(
            f"{reader.source}: {counted(bad, 'row')} cannot be served, and --strict was given: nothing was run"
        )
