"""Worker processes with a loaded model, from their start to their end. They serve one task after the other."""

import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from rosebatch.config.byte_sizes import in_bytes
from rosebatch.config.run import RunConfig
from rosebatch.core.errors import LostProcessError, UserError
from rosebatch.host.child_process import Failed
from rosebatch.job.model_info import ModelInfo
from rosebatch.job.workers import messages as m
from rosebatch.job.workers.hosts import Hosts
from rosebatch.job.workers.worker import Task, Worker

# How often the parent looks for signals and for silent workers while no message comes.
_PATIENCE_SECONDS = 0.1
# Of the time between two such looks, what counts as a worker's silence.
_MAX_PASSED_SECONDS = 1.0
# A worker whose processes die so often, with no row answered in between, is given up.
_MAX_DEATHS = 8
# Processes that die while they load the model, one after the other, before the job is given up.
_MAX_FALSE_STARTS = 3
# How many times the slowest start a run waits while nobody can serve. A cluster first ends the one that hangs.
_STARTS = 10
# Messages that are worked on before rows are handed out again.
_MAX_MESSAGES = 64
# A run's limit divided among its workers may be less than one run may have.
_MIN_INFLIGHT = 2**20

# Number of the worker, number of its process, message. What comes from None is called.
_Message = tuple[int | None, int, Any]


def _hosts(config: RunConfig) -> Hosts:
    if config.ray is None:
        from rosebatch.job.workers.machine import Machine

        return Machine(config)
    from rosebatch.job.workers.ray_cluster import RayCluster

    return RayCluster(config)


class Pool:
    """Worker processes. A thread for each brings its messages; everything else happens in ``turn``.

    Args:
        config: of the run; memory on the host is for all workers together.
        quiet: no progress of a download on stderr.

    Attributes:
        facts: of the model, once ``start`` has returned.
        tokenizer_folder: None for a model that works on token ids.
        inflight: bytes of rows that each worker may have.
    """

    facts: ModelInfo
    tokenizer_folder: Path | None

    def __init__(self, config: RunConfig, *, quiet: bool) -> None:
        self._hosts = _hosts(config)
        self.workers = [Worker(name) for name in self._hosts.names]
        # Memory is the machine's, and each has a share of it.
        self.inflight = in_bytes(config.max_inflight_bytes) // len(self.workers)
        own = max(self.inflight, _MIN_INFLIGHT)
        self._config = replace(config, data_parallel_size=len(self.workers), ray=None, max_inflight_bytes=own)
        self._quiet = quiet
        self._inbox: SimpleQueue[_Message] = SimpleQueue()
        self._taken: deque[_Message] = deque()
        self._may_load = False
        # The state of the files of the model that the run began with; their hash, if somebody asked; and the process
        # that computes it.
        self._state: str | None = None
        self._fingerprint: str | None = None
        self._wants_fingerprint = False
        self._identifying: tuple[int, int] | None = None
        self._task: Task | None = None
        # Whether workers that become ready still take part in the task.
        self._task_is_open = False
        self._closed = False
        # The question to a worker, and its answer.
        self._question: Any = None
        self._asked: tuple[int, int] | None = None
        self._answer: m.Answer | None = None
        # When silent workers were last looked for.
        self._looked = 0.0
        # Seconds that the slowest worker took to start, and since one could serve.
        self._slowest_start = self._stopped = 0.0

    @property
    def places(self) -> Sequence[str]:
        """Names of the workers' devices."""
        return [worker.name for worker in self.workers]

    def start(self) -> None:
        """Start all processes, and wait until the first one has found the model."""
        for number in range(len(self.workers)):
            self._spawn(number)
        self.wait(lambda: any(worker.planned for worker in self.workers))

    def load(self) -> None:
        """Wait until one worker can serve; the others follow while rows are served."""
        if not self._may_load:
            self._may_load = True
            self._load_planned()
        self.wait(lambda: any(worker.ready for worker in self.workers))

    def load_all(self) -> None:
        """Wait until all workers can serve, apart from those that are given up."""
        self.load()
        self.wait(lambda: all(worker.ready or worker.process is None for worker in self.workers))

    def close(self) -> None:
        """End all processes. Whoever waits for their messages has an error then."""
        self._closed = True
        self._hosts.close(worker.process for worker in self.workers if worker.process is not None)

    def ask(self, question: Any) -> None:
        """Have one worker answer a question; see ``answer``."""
        self._question, self._answer, self._asked = question, None, None
        number = next((n for n, worker in enumerate(self.workers) if worker.planned), None)
        if number is not None:
            self._put_question(number)

    def answer(self) -> tuple[str, int]:
        """Wait for the answer.

        Raises:
            UserError: the worker says so.
        """
        self.wait(lambda: self._answer is not None)
        assert self._answer is not None
        if self._answer.num_bad is None:
            raise UserError(self._answer.value)
        return self._answer.value, self._answer.num_bad

    def identify(self) -> None:
        """Have one worker hash the files of the model; see ``fingerprint``."""
        self._wants_fingerprint = True
        self._ask_for_fingerprint()

    def fingerprint(self) -> str:
        """Wait for the hash.

        Raises:
            UserError: a file is unreadable.
        """
        self.wait(lambda: self._fingerprint is not None)
        assert self._fingerprint is not None
        return self._fingerprint

    def begin(self, task: Task) -> None:
        """Serve a task: all workers that are loaded take part, others once they are."""
        if all(worker.process is None for worker in self.workers):
            raise LostProcessError("no worker is left: their processes died again and again")
        # Workers may be at the last step of a task that was dropped.
        self.wait(lambda: not any(worker.begun for worker in self.workers))
        for worker in self.workers:
            worker.done = None
        self._task, self._task_is_open = task, True
        for number, worker in enumerate(self.workers):
            if worker.ready:
                self._join(number)

    def end(self, *, drop: bool = False) -> None:
        """No more rows follow. The workers send their counts, and are ready for another task then.

        A task that has not begun leaves the workers alone: they may have an earlier one's end still before them.

        Args:
            drop: leave the rows that they have.
        """
        if not self._task_is_open:
            return
        self._task_is_open = False
        for number, worker in enumerate(self.workers):
            if worker.begun:
                self.send(number, m.End(drop))

    def forget(self) -> None:
        """Later messages are not for the task any more."""
        self._task = None

    def send(self, number: int, message: Any) -> None:
        """Send a message to a worker."""
        process = self.workers[number].process
        assert process is not None, "only a worker with a process takes messages"
        process.send(message)

    def call(self, function: Callable[[], None]) -> None:
        """Call a function in the next turn. For other threads."""
        self._inbox.put((None, 0, function))

    def wait(self, done: Callable[[], bool]) -> None:
        """Work on messages until something is so."""
        while not done():
            self.turn()

    def turn(self) -> None:
        """Wait a moment for messages, and work on them.

        Raises:
            RuntimeError: the workers were closed; their deaths would call for others.
        """
        if self._closed:
            raise RuntimeError("the worker processes are closed")
        if self._task is not None:
            self._task.turn()
        try:
            self._take_messages()
            # One that raises leaves those after it for the next turn.
            while self._taken:
                number, life, message = self._taken.popleft()
                if number is None:
                    message()
                elif life == self.workers[number].life:
                    self._receive(number, message)
            self._end_silent()
        finally:
            if self._task is not None:
                self._task.flush()

    def _take_messages(self) -> None:
        """Those that have come. Together they cost less: results are written once, and rows handed out once."""
        with suppress(Empty):
            self._taken.append(self._inbox.get(timeout=0 if self._taken else _PATIENCE_SECONDS))
            while len(self._taken) < _MAX_MESSAGES:
                self._taken.append(self._inbox.get_nowait())

    def _receive(self, number: int, message: Any) -> None:
        worker = self.workers[number]
        worker.silence = 0.0
        if message is None:
            self._bury(number)
        elif isinstance(message, m.Results):
            # Those of a task that was dropped are nobody's.
            if self._task is not None:
                self._task.take_results(number, message)
                worker.deaths = 0
        elif isinstance(message, m.Beat):
            if self._task is not None and message.outlook is not None:
                self._task.hear(number, message.outlook)
        elif isinstance(message, m.Planned):
            self._plan(number, message)
        elif isinstance(message, m.Ready):
            worker.ready, worker.false_starts = message, 0
            self._slowest_start = max(self._slowest_start, time.perf_counter() - worker.started)
            if self._task_is_open:
                self._join(number)
        elif isinstance(message, m.Identified):
            self._fingerprint = message.fingerprint
            self._load_planned()
        elif isinstance(message, m.Answer):
            self._answer, self._question = message, None
        elif isinstance(message, m.Lost):
            worker.lost = message.why
        elif isinstance(message, m.Done):
            if message.stats.first_token_time is not None:
                message.stats.first_token_time += worker.joined
            worker.done, worker.begun = message, False
        elif isinstance(message, Failed):
            raise message.error

    def _spawn(self, number: int) -> None:
        worker = self.workers[number]
        worker.planned, worker.loads, worker.ready, worker.lost, worker.begun = False, False, None, None, False
        worker.silence, worker.started = 0.0, time.perf_counter()
        life = worker.life
        try:
            worker.process = self._hosts.start(
                number, lambda message: self._inbox.put((number, life, message)), loud=number == 0 and life == 0
            )
        except OSError as error:
            raise LostProcessError(f"{worker.name}: a worker process cannot be started ({error.strerror})") from None
        worker.process.send(m.Setup(self._config, quiet=self._quiet or number > 0))

    def _put_question(self, number: int) -> None:
        """Ask a worker, unless another one is about to answer."""
        if self._question is None or self._lives(self._asked):
            return
        worker = self.workers[number]
        self._asked = number, worker.life
        self.send(number, self._question)

    def _plan(self, number: int, message: m.Planned) -> None:
        worker = self.workers[number]
        worker.name = self._hosts.names[number]
        if self._task is not None:
            self._task.rename(number, worker.name)
        if self._state is None:
            self._state, self.facts, self.tokenizer_folder = message.state, message.facts, message.tokenizer_folder
        elif message.facts != self.facts:
            raise UserError(f"{worker.name}: {self.facts.name} is not the model that the run began with")
        worker.planned, worker.is_same = True, message.state == self._state
        self._put_question(number)
        self._ask_for_fingerprint()
        self._load_planned()

    def _load_planned(self) -> None:
        """Have processes load the model that the run began with: others may have it in other files."""
        for number, worker in enumerate(self.workers):
            if not self._may_load or not worker.planned or worker.loads:
                continue
            if not worker.is_same and self._fingerprint is None:
                self.identify()
                if self._identifying is None:
                    raise UserError(f"{worker.name}: the files of {self.facts.name} changed after the run began")
                continue
            worker.loads = True
            self.send(number, m.Load(None if worker.is_same else self._fingerprint))

    def _ask_for_fingerprint(self) -> None:
        """Ask a process that has the files of the first one, unless another one is about to answer."""
        if not self._wants_fingerprint or self._fingerprint is not None or self._lives(self._identifying):
            return
        number = next((n for n, worker in enumerate(self.workers) if worker.planned and worker.is_same), None)
        self._identifying = None if number is None else (number, self.workers[number].life)
        if number is not None:
            self.send(number, m.Fingerprint())

    def _lives(self, process: tuple[int, int] | None) -> bool:
        """Whether a process, the number of its worker and its own, is still that of its worker."""
        return process is not None and self.workers[process[0]].life == process[1]

    def _join(self, number: int) -> None:
        assert self._task is not None, "there is something to join"
        worker = self.workers[number]
        worker.begun = True
        worker.joined, worker.silence = time.perf_counter(), 0.0
        self.send(number, self._task.message)
        self._task.join(number)

    def _end_silent(self) -> None:
        """A worker that shows no sign of life in a task hangs: it is as good as dead. An idle one shows none.

        This process may have been stopped, and its workers too. So a long time between two looks counts as a short one.
        """
        now = time.perf_counter()
        passed = now - self._looked
        if passed < _PATIENCE_SECONDS:
            return
        self._looked = now
        for number, worker in enumerate(self.workers):
            worker.silence += min(passed, _MAX_PASSED_SECONDS)
            if worker.begun and worker.process is not None and worker.silence > self._config.worker_timeout:
                worker.lost = f"no sign of life for {worker.silence:.0f} s"
                worker.process.kill()
                # A process that a driver holds cannot end, nor say that it is gone.
                self._inbox.put((number, worker.life, None))
        self._require_one(min(passed, _MAX_PASSED_SECONDS))

    def _require_one(self, passed: float) -> None:
        """Whoever takes the place of the last worker may hang before it shows signs of life, or find no place.

        Before the first one is loaded, nobody knows how long that takes: the model may come over a slow network.
        """
        if self._slowest_start == 0.0 or any(worker.ready for worker in self.workers):
            self._stopped = 0.0
            return
        self._stopped += passed
        limit = max(self._config.worker_timeout, _STARTS * self._slowest_start)
        if self._stopped > limit:
            raise LostProcessError(f"no worker is left: none has come back within {limit:.0f} s")

    def _bury(self, number: int) -> None:
        """A process is gone: its rows go to others, and another process takes its place."""
        worker = self.workers[number]
        assert worker.process is not None
        how = worker.lost or worker.process.how_it_ended()
        was_ready, had_begun = worker.ready, worker.begun
        worker.ready, worker.planned, worker.begun = None, False, False
        # Its end may be told twice.
        worker.life += 1
        if was_ready is None:
            worker.false_starts += 1
            if worker.false_starts >= _MAX_FALSE_STARTS:
                raise LostProcessError(f"{worker.name}: the worker process ends before the model is loaded ({how})")
        elif self._task is not None and had_begun:
            self._task.died(number, how)
        worker.deaths += 1
        worker.restarts += 1
        if worker.deaths < _MAX_DEATHS:
            _warn(f"{worker.name}: the worker process died ({how}); another one computes its rows again")
            self._spawn(number)
            return
        worker.process = None
        if self._task is not None:
            self._task.lose()
        if all(each.process is None for each in self.workers):
            raise LostProcessError(f"no worker is left: their processes died again and again, the last one with {how}")
        _warn(f"{worker.name}: {worker.deaths} worker processes died ({how}); the others continue")


def _warn(sentence: str) -> None:
    sys.stderr.write(f"rosebatch: warning: {sentence}\n")
