"""Timing several worker processes, which share the prompts of a scenario. The report is that of the median run."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from rosebatch.bench.case import Case, spread
from rosebatch.bench.throughput import machine_versions, of_runs
from rosebatch.bench.workload import Workload, require_fits
from rosebatch.core.errors import UserError
from rosebatch.core.request import Request
from rosebatch.io.output import Sink
from rosebatch.io.parse import Record
from rosebatch.io.results import Result
from rosebatch.io.rows import FailedRow, Row
from rosebatch.job.report.build import build_report
from rosebatch.job.serve_options import Parsed, ServeOptions
from rosebatch.job.service import Served
from rosebatch.job.workers import messages as m
from rosebatch.job.workers.pool import Pool
from rosebatch.job.workers.row_task import RowTask


class _Counts:
    """Token ids in, counts out; see ``rosebatch.io.results.Shape``."""

    def result(self, result: Result) -> None:
        """See ``Shape``."""

    def failure(self, row: FailedRow) -> NoReturn:
        """A bench has no use for failed rows."""
        raise UserError(f"{row.where}: {row.error.message}")


# No text is decoded, as in any bench.
_SERVING = ServeOptions(_Counts(), in_order=True, decode=False)


@contextmanager
def open_pool(case: Case) -> Iterator[Pool]:
    """The workers of a case, with their models; they end with the ``with`` block.

    Raises:
        UserError: as ``rosebatch.launch.launch.launch``.
    """
    pool = Pool(case.config, quiet=False)
    try:
        pool.start()
        pool.load_all()
        yield pool
    finally:
        pool.close()


def time_case_over(pool: Pool, case: Case, repeats: int, import_seconds: float) -> dict[str, Any]:
    """Time a case on the workers of a pool.

    A run goes from its first row to its last result, over all workers.

    Returns:
        as ``rosebatch.bench.throughput.time_case``, and ``workers``: what each did in the median run. ``idle_share`` is
        the part of that run for which the worker that finished first waited for the last one. There is no floor.
    """
    tasks = [_run(pool, case.workload(number), case) for number in range(repeats + 1)]
    warm_up, *timed = [task.seconds for task, _ in tasks]
    median = spread(timed)["median"]
    task, served = tasks[1 + timed.index(median)]
    startup = {"import": import_seconds, "load": served.load_seconds, "warm-up": warm_up}
    machine = {"gpu": served.gpu, "peak_memory_bytes": dict(served.peak_memory), "workers": [*served.workers]}
    # Workers wait for rows here, which would count as reading.
    task.tally.host_seconds.clear()
    report = build_report(task.tally, served.stats, dict(served.description), startup, median, machine=machine)
    report |= {"idle_share": max(worker["waited_s"] for worker in served.workers) / median}
    report |= of_runs(case, served.stats, timed)
    return report | {"versions": report["versions"] | machine_versions()}


def _run(pool: Pool, workload: Workload, case: Case) -> tuple[RowTask, Served]:
    limit = (worker.ready.description["max_sequence_len"] for worker in pool.workers if worker.ready)
    require_fits(workload, min(limit))
    records = [_record(request) for request in workload.requests(case.scenario.sampling)]
    task = RowTask(pool, m.Begin(Parsed(), _nothing, _SERVING), _Discard())
    for _ in task.serve_all(records):
        pass
    wanted = sum(workload.output_lens)
    assert task.tally.output_tokens == wanted, f"{task.tally.output_tokens} tokens instead of {wanted}"
    return task, task.served()


def _record(request: Request) -> Record:
    where, ids = f"prompt {request.id}", request.prompt_token_ids
    row: Any = Row(index=request.id, where=where, metadata={}, sampling=request.sampling, prompt_token_ids=ids)
    return Record(request.id, where, row, 8 * len(ids))


def _nothing(index: int, row: Any, *, failed: bool) -> bytes:
    return b""


class _Discard(Sink):
    def add_lines(self, indices: Sequence[int], lines: Sequence[bytes], failed: Collection[int]) -> None:
        """Results are only counted, by the tally."""
