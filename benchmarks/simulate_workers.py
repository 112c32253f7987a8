"""Simulated jobs of 8 to 1,024 workers: what long answers, deaths and the parent cost. No GPU and no process.

``python -m benchmarks.simulate_workers [--workers 8 64 1024] [--rows-per-seat 40]`` runs the real
``Dispatcher`` on a virtual clock and prints a line for each job.

- Answers have lognormal lengths of ``mean_tokens``, cut at 16 times that. With sigma 1, the longest of 100 is 6 to 10
  times the mean. With ``--known``, the parent knows each length, as ``max_tokens`` of rows that reach it.
- A worker computes up to ``slots`` rows at a time, each a token a step. A step takes ``step_ms`` and ``row_us`` for
  each row. The defaults are those of Qwen3-0.6B on an H100: 21,000 tokens a second with 256 rows.
- A worker's processes die at random, after ``life_s`` seconds on average, and need ``load_s`` to come back.
- The parent works on one message after the other; ``benchmarks.parent_load`` measures its times.
"""

import heapq
import math
import random
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count, islice

from benchmarks.options import options
from rosebatch.io.parse import Record
from rosebatch.job.lengths import class_of
from rosebatch.job.workers.child import results_seconds
from rosebatch.job.workers.chunk import in_chunks
from rosebatch.job.workers.dispatch import Dispatcher
from rosebatch.job.workers.service import MANY_WORKERS

# Steps between two looks at the rows that wait: two decode windows, because one is launched ahead.
_WINDOW = 16
# From one process to another.
_LATENCY_SECONDS = 0.001
_READ_ROWS = 256
# CPU time of the parent for a row, and with a process of its own that reads the input.
_ROW_US, _ROW_US_OF_MANY = 10.0, 4.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is simulated; see the module."""

    workers: int
    rows: int
    slots: int = 256
    mean_tokens: float = 256.0
    sigma: float = 1.0
    known: bool = False
    step_ms: float = 3.0
    row_us: float = 36.0
    life_s: float = math.inf
    load_s: float = 30.0
    parent_row_us: float = _ROW_US
    parent_message_us: float = 100.0
    seed: int = 0

    def step_seconds(self, rows: int) -> float:
        """Time of a step with so many rows."""
        return self.step_ms * 1e-3 + rows * self.row_us * 1e-6


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job went.

    Attributes:
        seconds: from the first row to the last.
        ideal_seconds: with all seats of all workers taken until the end, and no deaths.
        idle: share of the job that workers waited after their last row, on average.
        max_idle: the same of the worker that waited longest.
        deaths: of processes.
        again: rows that were begun again, as a share of all.
        parent_busy: share of the job that the parent worked.
    """

    seconds: float
    ideal_seconds: float
    idle: float
    max_idle: float
    deaths: int
    again: float
    parent_busy: float


@dataclass(slots=True)
class _Worker:
    """A worker's rows. ``life`` counts its processes; ``running`` are pairs of the last step and the row."""

    life: int = 0
    steps: int = 0
    ticking: bool = False
    waiting: deque[int] = field(default_factory=deque)
    running: list[tuple[int, int]] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)
    sent: float = 0.0
    last_answer: float = 0.0


def simulate(job: Job) -> Outcome:
    """Run a job on a virtual clock. The same job has the same outcome."""
    return _Simulation(job).run()


class _Simulation:
    def __init__(self, job: Job) -> None:
        self._job = job
        chance = random.Random(job.seed)
        shift = math.log(job.mean_tokens) - job.sigma**2 / 2
        limit = 16 * job.mean_tokens
        self._tokens = array(
            "I", (round(max(1.0, min(limit, chance.lognormvariate(shift, job.sigma)))) for _ in range(job.rows))
        )
        self._chance = chance
        self._patience = results_seconds(job.workers)
        self._dispatcher = Dispatcher(job.workers, 1 << 60, self._length_of)
        self._workers = [_Worker() for _ in range(job.workers)]
        self._unread: Iterator[Record] = (Record(number, "", b"", 1) for number in range(job.rows))
        # Time, a number that makes the order of equal times plain, what happens.
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self._now = self._parent_free = self._parent_seconds = 0.0
        self._alive: set[int] = set()
        self._deaths = self._again = 0

    def _length_of(self, record: Record) -> int:
        return class_of(self._tokens[record.number]) if self._job.known else 0

    def run(self) -> Outcome:
        for number in range(self._job.workers):
            self._begin(number)
        while not self._dispatcher.finished:
            self._now, _, happen = heapq.heappop(self._events)
            happen()
        job, seconds = self._job, self._now
        waited = [seconds - worker.last_answer for worker in self._workers]
        full = job.step_seconds(job.slots) / job.slots
        return Outcome(
            seconds=seconds,
            ideal_seconds=sum(self._tokens) * full / job.workers,
            idle=sum(waited) / len(waited) / seconds,
            max_idle=max(waited) / seconds,
            deaths=self._deaths,
            again=self._again / job.rows,
            parent_busy=self._parent_seconds / seconds,
        )

    def _after(self, seconds: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._now + seconds, next(self._numbers), happen))

    def _of_life(self, number: int, happen: Callable[[], None]) -> Callable[[], None]:
        """Nothing happens once the process has died."""
        life = self._workers[number].life

        def if_alive() -> None:
            if self._workers[number].life == life:
                happen()

        return if_alive

    def _begin(self, number: int) -> None:
        """A process is ready."""
        self._dispatcher.join(number, self._job.slots)
        self._alive.add(number)
        if self._job.life_s < math.inf:
            self._after(self._chance.expovariate(1 / self._job.life_s), partial(self._die, number))
        self._hand_out([number])

    def _die(self, number: int) -> None:
        worker = self._workers[number]
        self._deaths += 1
        self._again += len(worker.running) + len(worker.finished)
        self._workers[number] = _Worker(life=worker.life + 1, last_answer=worker.last_answer)
        self._alive.discard(number)
        failed = self._dispatcher.died(number)
        assert not failed, "no row kills its worker three times by chance"
        self._after(self._job.load_s, partial(self._begin, number))
        self._hand_out(sorted(self._alive))

    def _hand_out(self, numbers: Sequence[int]) -> None:
        """The parent gives rows to the workers that may have more now."""
        while self._dispatcher.wants:
            rows = list(islice(self._unread, _READ_ROWS))
            if rows:
                self._dispatcher.offer(in_chunks(rows))
            else:
                self._dispatcher.end()
        for number in numbers:
            chunks = self._dispatcher.take(number)
            if chunks:
                arrive = partial(self._arrive, number, [row for chunk in chunks for row in chunk.numbers])
                self._after(self._parent_free - self._now + _LATENCY_SECONDS, self._of_life(number, arrive))

    def _arrive(self, number: int, rows: list[int]) -> None:
        worker = self._workers[number]
        worker.waiting.extend(rows)
        if not worker.ticking:
            self._tick(number)

    def _tick(self, number: int) -> None:
        """The worker takes its seats, and computes some steps."""
        job, worker = self._job, self._workers[number]
        while worker.waiting and len(worker.running) < job.slots:
            row = worker.waiting.popleft()
            heapq.heappush(worker.running, (worker.steps + self._tokens[row], row))
        worker.ticking = bool(worker.running)
        if worker.ticking:
            seconds = _WINDOW * job.step_seconds(len(worker.running))
            self._after(seconds, self._of_life(number, partial(self._finish, number)))

    def _finish(self, number: int) -> None:
        worker = self._workers[number]
        worker.steps += _WINDOW
        while worker.running and worker.running[0][0] <= worker.steps:
            worker.finished.append(heapq.heappop(worker.running)[1])
        idle = not worker.running and not worker.waiting
        due = len(worker.finished) >= self._job.slots // 4 or self._now - worker.sent >= self._patience
        if worker.finished and (due or idle):
            rows, worker.finished, worker.sent = worker.finished, [], self._now
            spent = (self._job.parent_message_us + len(rows) * self._job.parent_row_us) * 1e-6
            begun = max(self._now + _LATENCY_SECONDS, self._parent_free)
            self._parent_free, self._parent_seconds = begun + spent, self._parent_seconds + spent
            answer = partial(self._answer, number, rows)
            self._after(self._parent_free - self._now, self._of_life(number, answer))
        self._tick(number)

    def _answer(self, number: int, rows: list[int]) -> None:
        self._dispatcher.answered(number, rows)
        self._workers[number].last_answer = self._now
        self._hand_out([number])


def main() -> None:
    """Print a table."""
    given = options(
        __doc__,
        workers=[8, 64, 256, 1024],
        rows_per_seat=[10, 40],
        seats=256,
        sigma=1.0,
        mean_tokens=256.0,
        known=False,
        life_s=math.inf,
        parent_row_us={"type": float, "help": "default: as measured for so many workers"},
    )
    sys.stdout.write("workers | rows | s | of ideal | idle | most idle | deaths | rows again | parent busy\n")
    for workers in given.workers:
        for rows_per_seat in given.rows_per_seat:
            job = Job(
                workers=workers,
                rows=workers * given.seats * rows_per_seat,
                slots=given.seats,
                **{name: getattr(given, name) for name in ("sigma", "mean_tokens", "known", "life_s")},
                parent_row_us=given.parent_row_us or (_ROW_US if workers < MANY_WORKERS else _ROW_US_OF_MANY),
            )
            found = simulate(job)
            sys.stdout.write(
                f"{workers} | {job.rows} | {found.seconds:.0f} | {found.ideal_seconds / found.seconds:.1%} | "
                f"{found.idle:.1%} | {found.max_idle:.1%} | {found.deaths} | {found.again:.2%} | "
                f"{found.parent_busy:.1%}\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
