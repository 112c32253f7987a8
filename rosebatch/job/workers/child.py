"""The main function of a worker process: rows from the parent, results back."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from io import StringIO
from queue import Empty, SimpleQueue
from threading import Event, Thread
from typing import TYPE_CHECKING, Any, NoReturn

from rosebatch.core.errors import LostProcessError, UserError
from rosebatch.engine.metrics.outlook import Outlook
from rosebatch.host.child_process import Failed, ParentLink, run_child
from rosebatch.host.threads import in_background
from rosebatch.io.output import Encode, Sink
from rosebatch.io.rows import FailedRow, Row
from rosebatch.job.report.tally import Tally
from rosebatch.job.serve_options import Parse
from rosebatch.job.workers import messages as m

if TYPE_CHECKING:
    from rosebatch.launch.plan import LaunchPlan
    from rosebatch.model.source import ModelSource

# Between two signs of life.
_BEAT_SECONDS = 1.0
# How long an idle worker waits for rows before it shows a sign of life.
_PAUSE_SECONDS = 0.005
# Messages with results that wait for time, not for rows, from all workers together. Each takes the parent as long as
# some ten rows.
_MESSAGES_PER_SECOND = 1000
_MIN_RESULTS_SECONDS = 0.1


def main() -> NoReturn:
    """Serve the parent until it ends this process."""
    run_child(serve_parent, _PipeLink)


class _DroppedError(Exception):
    """The parent wants no more results of this task."""


class Link(ABC):
    """The connection to the parent, however it is made. ``deliver`` puts messages in; another thread may call it."""

    def __init__(self) -> None:
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._beaten = 0.0
        self.look: Callable[[], Outlook | None] = lambda: None
        # Whether the end of a task has come that drops its rows, and whether the last message received is an end.
        self._dropped = Event()
        self._at_end = True

    @abstractmethod
    def send(self, message: Any) -> None:
        """Send a message."""

    def deliver(self, message: Any) -> None:
        """Take in a message of the parent."""
        if isinstance(message, m.End) and message.drop:
            # Before it can be received, which unsets this.
            self._dropped.set()
        self._inbox.put(message)

    def receive(self, timeout: float | None = None) -> Any:
        """The next message; None if none comes in time."""
        try:
            message = self._inbox.get(timeout=timeout)
        except Empty:
            return None
        self._at_end = isinstance(message, m.End)
        return message

    def skip_to_end(self) -> None:
        """Leave the messages of a task that was dropped."""
        while not self._at_end:
            self.receive()
        self._dropped.clear()

    def check(self) -> None:
        """Show a sign of life, once a second.

        Raises:
            _DroppedError: the task is dropped.
        """
        if self._dropped.is_set():
            raise _DroppedError
        now = time.monotonic()
        if now - self._beaten >= _BEAT_SECONDS:
            self._beaten = now
            self.send(m.Beat(self.look()))


class _PipeLink(Link):
    """A pipe to the parent, whose end ends this process."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._parent = ParentLink(descriptor, self.deliver)

    def send(self, message: Any) -> None:
        """See ``Link``."""
        self._parent.send(message)


def serve_parent(link: Link) -> None:
    """Do what the parent wants. Send it the mistakes that make the job impossible."""
    try:
        _work(link)
    except LostProcessError as error:
        link.send(m.Lost(str(error)))
    except UserError as error:
        link.send(Failed.of(error))


def _work(link: Link) -> None:
    setup: m.Setup = link.receive()
    # PyTorch reads the environment when it is imported, and the parent goes on meanwhile.
    from rosebatch.job.local import model_info_of
    from rosebatch.job.report.build import peak_memory
    from rosebatch.job.report.provenance import gpu_name
    from rosebatch.job.run_rows import run_rows
    from rosebatch.job.workers.first_compile import compile_kernels
    from rosebatch.launch.launch import load
    from rosebatch.launch.plan import plan_fitting

    plan = plan_fitting(setup.config, quiet=setup.quiet)
    link.send(m.Planned(model_info_of(plan), plan.source.state, plan.tokenizer_folder))
    while not isinstance(question := link.receive(), m.Load):
        _reply(link, question, plan)
    found = in_background(plan.source.fingerprint) if question.fingerprint is not None else None
    launched = load(plan)
    if found is not None and found() != question.fingerprint:
        raise UserError(f"{plan.source.name}: the model's files are not those that the run began with")
    engine = launched.engine
    link.look = engine.outlook
    if plan.device.type == "cuda" and not launched.is_compiled:
        compile_kernels(engine)
    link.send(m.Ready(engine.max_num_seqs, launched.description, launched.load_seconds))
    workers = setup.config.data_parallel_size
    assert isinstance(workers, int), "the parent has counted the workers"
    patience = results_seconds(workers)
    while True:
        begin = link.receive()
        if not isinstance(begin, m.Begin):
            _reply(link, begin, plan)
            continue
        begun, stats, tally = time.perf_counter(), engine.restart_stats(), Tally()
        output = _Pipe(link, begin.encode, tally, engine.max_num_seqs // 4, patience)
        rows = _rows(link, begin.parser, output, lambda: engine.has_unfinished)
        with suppress(_DroppedError):
            for _ in run_rows(rows, launched, begin.serving, output, tally, check=link.check):
                pass
            output.finish()
        link.skip_to_end()
        if stats.first_token_time is not None:
            # The parent may have another clock.
            stats.first_token_time -= begun
        link.send(m.Done(stats, peak_memory(), gpu_name()))


def results_seconds(workers: int) -> float:
    """How long results wait in a worker for others: so long that so many workers send few messages in all."""
    return max(_MIN_RESULTS_SECONDS, workers / _MESSAGES_PER_SECOND)


def _reply(link: Link, question: m.CountBad | m.Fingerprint, plan: "LaunchPlan") -> None:
    from rosebatch.job.check import check_file

    if isinstance(question, m.CountBad):
        reader = question.make_reader()
        try:
            # Not to stderr: that of most workers is kept for the case that they die.
            lines = StringIO()
            bad = check_file(reader, plan, lines, strict=True).errors.total()
            link.send(m.Answer(lines.getvalue(), bad))
        except UserError as error:
            link.send(m.Answer(str(error), None))
    else:
        assert isinstance(question, m.Fingerprint), question
        Thread(target=_identify, args=(link, plan.source), daemon=True).start()


def _identify(link: Link, source: "ModelSource") -> None:
    try:
        link.send(m.Identified(source.fingerprint()))
    except UserError as error:
        link.send(Failed.of(error))


def _rows(link: Link, parser: Parse, output: "_Pipe", busy: Callable[[], bool]) -> Iterator[Row | FailedRow | None]:
    """The rows that have come; None while there is none."""
    while True:
        is_busy = busy()
        if not is_busy:
            output.send()
        message = link.receive(timeout=0 if is_busy else _PAUSE_SECONDS)
        if message is None:
            yield None
        elif isinstance(message, m.End):
            if message.drop:
                raise _DroppedError
            return
        else:
            for record in message.records:
                yield parser.parse(record)


class _Pipe(Sink):
    """Sends results to the parent.

    A message costs the parent as much as many rows, so results wait for others: for a moment, or until they are
    ``limit``.
    """

    def __init__(self, link: Link, encode: Encode, tally: Tally, limit: int, patience: float) -> None:
        self._encode = encode
        self._link = link
        self._tally = tally
        self._limit = limit
        self._patience = patience
        self._sent = 0.0
        self._numbers: list[int] = []
        self._lines: list[bytes] = []
        self._failed: set[int] = set()

    @property
    def encode(self) -> Encode:
        """See ``Sink``."""
        return self._encode

    def add_lines(self, indices: Sequence[int], lines: Sequence[bytes], failed: Collection[int]) -> None:
        """Keep results for the next message."""
        self._numbers += indices
        self._lines += lines
        self._failed.update(failed)

    def flush(self) -> None:
        """Send the results so far, if it is time. Called after every step."""
        if len(self._numbers) >= self._limit or time.monotonic() - self._sent >= self._patience:
            self.send()

    def send(self) -> None:
        """Send the results so far."""
        if not self._numbers:
            return
        self._link.send(m.Results(self._numbers, self._lines, frozenset(self._failed), self._tally.take()))
        self._sent = time.monotonic()
        self._numbers, self._lines, self._failed = [], [], set()

    def finish(self) -> None:
        """Send the rest. The parent finishes the output."""
        self.send()
