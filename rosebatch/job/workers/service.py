"""A job over several processes, seen from the parent."""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from queue import Empty, SimpleQueue
from threading import Semaphore, Thread
from typing import Any

import msgspec

from rosebatch.config import RunConfig, in_bytes
from rosebatch.engine.stats import EngineStats
from rosebatch.errors import FlagError, RowError, UserError
from rosebatch.io.parse import Record
from rosebatch.io.reader import PromptReader
from rosebatch.io.rows import FailedRow
from rosebatch.job.facts import ModelFacts
from rosebatch.job.not_finite import MOST_NOT_FINITE, require_finite
from rosebatch.job.service import Served, Work
from rosebatch.job.workers import messages as m
from rosebatch.job.workers.dispatch import Dispatcher
from rosebatch.job.workers.hosts import Hosts, Worker

# Longest wait for a message before the parent looks at signals and at silent workers.
_PATIENCE_SECONDS = 0.1
# A worker whose processes die so often, with no row answered in between, is given up.
_MOST_DEATHS = 8
# Processes that die while they load the model, one after the other, before the job is given up.
_MOST_FALSE_STARTS = 3
# Rows that are read at a time, and such groups that wait.
_READ_ROWS = 64
_READ_GROUPS = 4
# A run's limit divided among its workers may be less than one run may have.
_LEAST_INFLIGHT = 2**20
# How long counts are waited for after the last row.
_END_SECONDS = 10.0


@dataclass(slots=True)
class _Worker:
    """A place for a process, which is replaced when it dies.

    Attributes:
        name: of its device.
        process: None once the worker is given up.
        life: number of the process; messages of earlier ones are ignored.
        planned: whether the process has found the model.
        ready: what it said when the model was loaded.
        heard: when the process last sent something.
        last_answer: when it last answered a row.
        deaths: of processes since the last answer; those that died while loading count apart.
    """

    name: str
    process: Worker | None = None
    life: int = 0
    planned: bool = False
    ready: m.Ready | None = None
    done: m.Done | None = None
    heard: float = 0.0
    last_answer: float = 0.0
    rows: int = 0
    output_tokens: int = 0
    deaths: int = 0
    false_starts: int = 0
    restarts: int = 0


class _EndOfInput:
    """The reader has no more rows."""


@contextmanager
def in_workers(config: RunConfig, *, quiet: bool) -> "Iterator[Workers]":
    """A service of several processes, which end with the ``with`` block.

    Args:
        config: of the run.
        quiet: no progress of a download, and no warning of a worker's death, on stderr.

    Raises:
        UserError: something that was asked for is missing, unreadable or impossible.
    """
    workers = Workers(config, _hosts(config), quiet=quiet)
    try:
        workers.start()
        yield workers
    finally:
        workers.close()


def _hosts(config: RunConfig) -> Hosts:
    if config.ray is None:
        from rosebatch.job.workers.machine import Machine

        return Machine(config)
    from rosebatch.job.workers.ray_cluster import RayCluster

    return RayCluster(config)


class Workers:
    """See ``rosebatch.job.service.Service``."""

    facts: ModelFacts

    def __init__(self, config: RunConfig, hosts: Hosts, *, quiet: bool) -> None:
        self._hosts = hosts
        self._workers = [_Worker(name) for name in hosts.names]
        self.places: Sequence[str] = hosts.names
        # Memory is the machine's, and each has a share of it.
        inflight = in_bytes(config.max_inflight_bytes) // len(self._workers)
        self._config = replace(
            config, data_parallel_size=1, ray=None, max_inflight_bytes=max(inflight, _LEAST_INFLIGHT)
        )
        self._quiet = quiet
        # Number of the worker, number of its process, message; rows that were read come from None.
        self._inbox: SimpleQueue[tuple[int | None, int, Any]] = SimpleQueue()
        self._dispatcher = Dispatcher(len(self._workers), inflight // 4)
        self._may_load = False
        self._work: Work | None = None
        # What a worker was asked, and its answer.
        self._question: Any = None
        self._asked: tuple[int, int] | None = None
        self._answer: m.Answer | None = None
        self._read: deque[list[Record]] = deque()
        self._may_read = Semaphore(_READ_GROUPS)
        self._input_ended = False
        self._began = self._ended = 0.0

    def start(self) -> None:
        """Start all processes, and wait until the first one has found the model."""
        for number in range(len(self._workers)):
            self._spawn(number)
        self._wait(lambda: any(worker.planned for worker in self._workers))

    def close(self) -> None:
        """End all processes."""
        self._hosts.close(worker.process for worker in self._workers if worker.process is not None)

    def fingerprint(self) -> Callable[[], str]:
        """See ``Service``."""
        self._ask(m.Fingerprint())
        return self._answered

    def count_bad(self, reader: PromptReader) -> int:
        """See ``Service``."""
        self._ask(m.CountBad(reader.source, dict(reader.defaults), reader.input_format, reader.result_column))
        return int(self._answered())

    def load(self) -> None:
        """See ``Service``: some worker can serve then; the others follow while rows are served."""
        self._may_load = True
        for number, worker in enumerate(self._workers):
            if worker.planned:
                self._tell(number, m.Load())
        self._wait(lambda: any(worker.ready for worker in self._workers))

    def run(self, work: Work) -> None:
        """See ``Service``."""
        self._work, self._began = work, time.perf_counter()
        for number, worker in enumerate(self._workers):
            if worker.ready:
                self._begin(number)
        Thread(target=self._read_rows, args=(work,), name="rosebatch-read", daemon=True).start()
        self._wait(lambda: self._dispatcher.finished)
        self._ended = time.perf_counter()
        for number, worker in enumerate(self._workers):
            if worker.ready:
                self._tell(number, m.End())
        until = self._ended + _END_SECONDS
        self._wait(lambda: all(w.done or not w.ready for w in self._workers) or time.perf_counter() > until)
        work.reader.require_unchanged()
        require_finite(work.tally, work.output.num_rows)
        work.output.finish()

    def served(self) -> Served:
        """See ``Service``."""
        stats, peak_memory = EngineStats(), dict[str, int]()
        for worker in self._workers:
            if worker.done is not None:
                stats.merge(worker.done.stats)
                for place, size in worker.done.peak_memory.items():
                    peak_memory[place] = peak_memory.get(place, 0) + size
        ready = [worker.ready for worker in self._workers if worker.ready is not None]
        return Served(
            stats,
            {**ready[0].description, "data_parallel_size": len(self._workers)},
            max(each.load_seconds for each in ready),
            peak_memory,
            next((worker.done.gpu for worker in self._workers if worker.done is not None), None),
            [self._account(worker) for worker in self._workers],
        )

    def _account(self, worker: _Worker) -> dict[str, Any]:
        """What a worker did, for the report."""
        seconds = self._ended - self._began
        return {
            "device": worker.name,
            "requests": worker.rows,
            "output_tokens": worker.output_tokens,
            "output_tokens_per_s": worker.output_tokens / seconds,
            "load_s": None if worker.ready is None else worker.ready.load_seconds,
            "waited_s": self._ended - max(worker.last_answer, self._began),
            "restarts": worker.restarts,
            "given_up": worker.process is None,
        }

    def _spawn(self, number: int) -> None:
        worker = self._workers[number]
        worker.life += 1
        worker.planned, worker.ready, worker.heard = False, None, time.perf_counter()
        life = worker.life
        worker.process = self._hosts.start(
            number, lambda message: self._inbox.put((number, life, message)), loud=number == 0 and life == 1
        )
        worker.process.tell(m.Setup(self._config, quiet=self._quiet or number > 0))

    def _ask(self, question: Any) -> None:
        self._question, self._answer, self._asked = question, None, None
        number = next((n for n, worker in enumerate(self._workers) if worker.planned), None)
        if number is not None:
            self._put_question(number)

    def _put_question(self, number: int) -> None:
        """Ask a worker, unless another one is about to answer."""
        if self._question is None or (self._asked and self._workers[self._asked[0]].life == self._asked[1]):
            return
        worker = self._workers[number]
        self._asked = number, worker.life
        self._tell(number, self._question)

    def _tell(self, number: int, message: Any) -> None:
        process = self._workers[number].process
        assert process is not None, "only a worker with a process is told something"
        process.tell(message)

    def _answered(self) -> str:
        self._wait(lambda: self._answer is not None)
        assert self._answer is not None
        if self._answer.is_error:
            raise UserError(self._answer.value)
        return self._answer.value

    def _wait(self, done: Callable[[], bool]) -> None:
        """Work on messages until something is so."""
        while not done():
            if self._work is not None:
                self._work.check()
                self._hand_out(self._work)
            try:
                number, life, message = self._inbox.get(timeout=_PATIENCE_SECONDS)
            except Empty:
                self._end_silent()
                continue
            if number is None:
                self._take_input(message)
            elif life == self._workers[number].life:
                self._hear(number, message)

    def _hear(self, number: int, message: Any) -> None:
        worker = self._workers[number]
        worker.heard = time.perf_counter()
        if message is None:
            self._bury(number)
        elif isinstance(message, m.Results):
            self._write(number, message)
        elif isinstance(message, m.Planned):
            self._plan(number, message)
        elif isinstance(message, m.Ready):
            worker.ready, worker.false_starts = message, 0
            if self._work is not None:
                self._begin(number)
        elif isinstance(message, m.Answer):
            self._answer, self._question = message, None
        elif isinstance(message, m.Done):
            worker.done = message
        elif isinstance(message, m.Failed):
            raise (FlagError if message.is_usage else UserError)(message.message)

    def _plan(self, number: int, message: m.Planned) -> None:
        self._workers[number].planned, self.facts = True, message.facts
        self._workers[number].name = self._hosts.names[number]
        if self._work is not None:
            self._work.progress.rename(number, self._hosts.names[number])
        self._put_question(number)
        if self._may_load:
            self._tell(number, m.Load())

    def _begin(self, number: int) -> None:
        """A loaded worker takes part."""
        worker, work = self._workers[number], self._work
        assert work is not None and worker.ready is not None
        fields = work.output.fields
        self._tell(number, m.Begin(work.reader.parser, work.shape, fields, work.seed, work.return_token_ids))
        self._dispatcher.join(number, worker.ready.seats)

    def _read_rows(self, work: Work) -> None:
        """Read the input, on a thread: some groups ahead."""
        try:
            rows = (record for record in work.reader.records() if record.number not in work.output)
            while True:
                self._may_read.acquire()
                group = list(islice(rows, _READ_ROWS))
                if not group:
                    break
                self._inbox.put((None, 0, group))
            self._inbox.put((None, 0, _EndOfInput()))
        except BaseException as error:
            self._inbox.put((None, 0, error))

    def _take_input(self, message: Any) -> None:
        if isinstance(message, BaseException):
            raise message
        if isinstance(message, _EndOfInput):
            self._input_ended = True
        else:
            self._read.append(message)

    def _hand_out(self, work: Work) -> None:
        """Give rows to the workers that have credit."""
        while self._read and self._dispatcher.wants:
            self._dispatcher.offer(self._read.popleft())
            self._may_read.release()
        if self._input_ended and not self._read:
            self._dispatcher.end()
        # A stream waits for an earlier row: those that are under way come first.
        if work.output.full and self._dispatcher.busy:
            return
        for number, worker in enumerate(self._workers):
            if worker.ready and (rows := self._dispatcher.take(number)):
                self._tell(number, m.Rows(rows))

    def _write(self, number: int, results: m.Results) -> None:
        worker, work = self._workers[number], self._work
        assert work is not None
        for row in results.rows:
            self._dispatcher.answered(number, row.number)
            work.output.add(row.number, msgspec.Raw(row.line), failed=row.failed)
        work.output.flush()
        work.tally.merge(results.tally)
        tokens = results.tally.output_tokens
        work.progress.advance(len(results.rows), output_tokens=tokens, failed=results.tally.failed, place=number)
        require_finite(work.tally, work.output.num_rows, at_least=MOST_NOT_FINITE)
        worker.rows += len(results.rows)
        worker.output_tokens += tokens
        worker.last_answer, worker.deaths = time.perf_counter(), 0

    def _end_silent(self) -> None:
        """A worker that shows no sign of life hangs: it is as good as dead."""
        now = time.perf_counter()
        for worker in self._workers:
            if worker.ready and worker.process is not None and now - worker.heard > self._config.worker_timeout:
                worker.process.kill()

    def _bury(self, number: int) -> None:
        """A process is gone: its rows go to others, and another process takes its place."""
        worker = self._workers[number]
        assert worker.process is not None
        how = worker.process.how_it_ended()
        if worker.done is not None:
            return
        was_ready, worker.ready, worker.planned = worker.ready, None, False
        if was_ready is None:
            worker.false_starts += 1
            if worker.false_starts >= _MOST_FALSE_STARTS:
                raise UserError(f"{worker.name}: the worker process ends before the model is loaded ({how})")
        elif self._work is not None:
            self._fail(self._dispatcher.died(number), how, self._work)
        worker.deaths += 1
        worker.restarts += 1
        if worker.deaths < _MOST_DEATHS:
            self._warn(f"{worker.name}: the worker process died ({how}); another one computes its rows again")
            self._spawn(number)
            return
        worker.process = None
        self._dispatcher.lose()
        if all(each.process is None for each in self._workers):
            kept = "" if self._work is None else self._work.output.kept
            raise UserError(f"no worker is left: their processes died again and again, the last one with {how}{kept}")
        self._warn(f"{worker.name}: {worker.deaths} worker processes died ({how}); the others continue")

    def _fail(self, records: list[Record], how: str, work: Work) -> None:
        for record in records:
            row = work.reader.parser.parse(record)
            error = RowError("worker_died", f"the worker process that computes this row dies each time ({how})")
            failed = FailedRow(index=row.index, where=row.where, metadata=row.metadata, error=error)
            work.output.add(row.index, work.shape.failure(failed), failed=True)
            work.tally.add_error(error)
            work.progress.advance(failed=1)
        work.output.flush()

    def _warn(self, sentence: str) -> None:
        if not self._quiet:
            sys.stderr.write(f"rosebatch: warning: {sentence}\n")
