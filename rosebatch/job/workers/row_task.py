"""Rows that the workers of a pool serve, and where their results go."""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from threading import Semaphore, Thread
from typing import Any

from rosebatch.core.errors import RowError
from rosebatch.engine.metrics.outlook import Outlook
from rosebatch.engine.metrics.stats import EngineStats
from rosebatch.io.output import Sink
from rosebatch.io.parse import Record
from rosebatch.io.rows import FailedRow
from rosebatch.job.lengths import length_class
from rosebatch.job.report.progress import Progress
from rosebatch.job.report.tally import Tally
from rosebatch.job.service import Served
from rosebatch.job.workers import messages as m
from rosebatch.job.workers.chunk import Chunk, in_chunks
from rosebatch.job.workers.dispatch import Dispatcher
from rosebatch.job.workers.pool import Pool

# Groups of rows that were read and wait.
_READ_GROUPS = 4
# Of a worker's description: the job has those of all.
_SUMS = ("kv_cache_blocks", "kv_cache_bytes")
# How long counts are waited for after the last row.
_END_SECONDS = 10.0


@dataclass(slots=True)
class _Account:
    """What a worker did in a task; ``ready`` is its message when it was loaded last."""

    ready: m.Ready | None = None
    rows: int = 0
    output_tokens: int = 0
    last_answer: float = 0.0
    outlook: Outlook = field(default_factory=Outlook)
    heard: float = 0.0


@dataclass(slots=True)
class RowTask:
    """See ``rosebatch.job.workers.pool.Task``.

    Attributes:
        pool: serves it.
        message: its first message to workers.
        output: takes the results.
        tally: counts them.
        progress: counts them, too.
        check: called in every turn; what it raises ends the task there.
    """

    pool: Pool
    message: m.Begin
    output: Sink
    tally: Tally = field(default_factory=Tally)
    progress: Progress = field(default_factory=lambda: Progress(None, enabled=False))
    check: Callable[[], None] = lambda: None
    _accounts: list[_Account] = field(init=False)
    _dispatcher: Dispatcher = field(init=False)
    _read: deque[Iterable[Chunk]] = field(default_factory=deque)
    _may_read: Semaphore = field(default_factory=lambda: Semaphore(_READ_GROUPS))
    _input_ended: bool = False
    _closed: bool = False
    _began: float = 0.0
    _ended: float = 0.0

    def __post_init__(self) -> None:
        self._accounts = [_Account() for _ in self.pool.workers]
        num_workers = sum(worker.process is not None for worker in self.pool.workers)
        parse = self.message.parser.parse
        self._dispatcher = Dispatcher(num_workers, self.pool.inflight // 4, lambda record: length_class(parse(record)))

    @property
    def seconds(self) -> float:
        """From the begin to the last result."""
        return self._ended - self._began

    def serve_all(self, records: Sequence[Record]) -> Generator[None, None, None]:
        """Serve rows that are all known: each worker has its share from the first moment.

        Yields:
            after every turn. Closing the iterator drops what is unfinished.
        """
        self._read.append(in_chunks(records))
        self._input_ended = True
        return self._steps()

    def serve(self, groups: Iterable[Sequence[Chunk]]) -> Generator[None, None, None]:
        """Serve rows as a thread takes them from an iterator, some groups ahead. See ``serve_all``."""
        Thread(target=self._read_rows, args=(groups,), name="rosebatch-read", daemon=True).start()
        return self._steps()

    def _steps(self) -> Generator[None, None, None]:
        pool, drop = self.pool, True
        try:
            pool.begin(self)
            self._began = time.perf_counter()
            self.progress.watch(self.outlook)
            while not self._dispatcher.finished:
                pool.turn()
                yield
            self._ended = time.perf_counter()
            drop = False
            pool.end()
            until = self._ended + _END_SECONDS
            pool.wait(lambda: not any(w.begun for w in pool.workers) or time.perf_counter() > until)
        finally:
            if drop:
                pool.end(drop=True)
            pool.forget()
            self._closed = True
            self._may_read.release()

    def served(self) -> Served:
        """What served the rows, once all are."""
        stats, peak_memory = EngineStats(), dict[str, int]()
        done = [worker.done for worker in self.pool.workers if worker.done is not None]
        for each in done:
            stats.merge(each.stats)
            for place, size in each.peak_memory.items():
                peak_memory[place] = peak_memory.get(place, 0) + size
        ready = [account.ready for account in self._accounts if account.ready is not None]
        return Served(
            stats,
            {
                **ready[0].description,
                **{name: sum(each.description[name] for each in ready) for name in _SUMS},
                "data_parallel_size": len(self.pool.workers),
            },
            max(each.load_seconds for each in ready),
            peak_memory,
            next((each.gpu for each in done), None),
            [self._worker_report(number) for number in range(len(self.pool.workers))],
        )

    def _worker_report(self, number: int) -> dict[str, Any]:
        """What a worker did, for the report."""
        worker, own = self.pool.workers[number], self._accounts[number]
        return {
            "device": worker.name,
            "requests": own.rows,
            "output_tokens": own.output_tokens,
            "output_tokens_per_s": own.output_tokens / self.seconds,
            "load_s": None if own.ready is None else own.ready.load_seconds,
            "waited_s": self._ended - max(own.last_answer, self._began),
            "restarts": worker.restarts,
            "given_up": worker.process is None,
        }

    def outlook(self) -> Outlook:
        """Of all workers, as they last said."""
        now = time.perf_counter()
        told = [account.outlook._replace(age=now - account.heard) for account in self._accounts if account.heard]
        return reduce(Outlook.plus, told, Outlook())

    def hear(self, number: int, outlook: Outlook) -> None:
        """See ``Task``."""
        account = self._accounts[number]
        account.outlook, account.heard = outlook, time.perf_counter()

    def turn(self) -> None:
        """See ``Task``."""
        self.check()
        self.progress.tick()
        self._hand_out()

    def flush(self) -> None:
        """See ``Task``."""
        self.output.flush()

    def join(self, number: int) -> None:
        """See ``Task``."""
        ready = self.pool.workers[number].ready
        assert ready is not None, "a worker that takes part is loaded"
        self._accounts[number].ready = ready
        self._dispatcher.join(number, ready.slots)

    def lose(self) -> None:
        """See ``Task``."""
        self._dispatcher.lose()

    def rename(self, number: int, name: str) -> None:
        """See ``Task``."""
        if self.progress.has_places:
            self.progress.rename(number, name)

    def _read_rows(self, groups: Iterable[Sequence[Chunk]]) -> None:
        """Read the input, on a thread: some groups ahead."""
        try:
            for group in groups:
                self._may_read.acquire()
                if self._closed:
                    return
                self.pool.call(partial(self._read.append, group))
            self.pool.call(self._end_input)
        except BaseException as error:
            self.pool.call(partial(self._fail_input, error))

    def _end_input(self) -> None:
        self._input_ended = True

    def _fail_input(self, error: BaseException) -> None:
        if not self._closed:
            raise error

    def _hand_out(self) -> None:
        """Give rows to the workers that have credit."""
        while self._read and self._dispatcher.wants:
            self._dispatcher.offer(self._read.popleft())
            self._may_read.release()
        if self._input_ended and not self._read:
            self._dispatcher.end()
        # A stream waits for an earlier row: those that are under way come first.
        if self.output.full and self._dispatcher.busy:
            return
        for number in self._dispatcher.by_load():
            if chunks := self._dispatcher.take(number):
                self.pool.send(number, m.Rows([chunk.packed for chunk in chunks]))

    def take_results(self, number: int, results: m.Results) -> None:
        """See ``Task``."""
        self._dispatcher.answered(number, results.numbers)
        self.output.add_lines(results.numbers, results.lines, results.failed)
        self.tally.merge(results.tally)
        rows, tokens, own = len(results.numbers), results.tally.output_tokens, self._accounts[number]
        place = number if self.progress.has_places else None
        counted = results.tally.prompt_tokens if self.progress.counts == "prompt" else tokens
        self.progress.advance(rows, tokens=counted, failed=results.tally.failed, place=place)
        own.rows += rows
        own.output_tokens += tokens
        own.last_answer = time.perf_counter()

    def died(self, number: int, how: str) -> None:
        """See ``Task``: the worker's rows wait for others. One that killed several workers has failed."""
        for record in self._dispatcher.died(number):
            row = self.message.parser.parse(record)
            error = RowError("worker_died", f"the worker process that computes this row dies each time ({how})")
            failed = FailedRow(index=row.index, where=row.where, metadata=row.metadata, error=error)
            self.output.add(row.index, self.message.serving.shape.failure(failed), failed=True)
            self.tally.add_error(error)
            self.progress.advance(failed=1)
        self.output.flush()
