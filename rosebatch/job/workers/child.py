"""The main function of a worker process: rows from the parent, results back."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any, NoReturn, Protocol

import msgspec

from rosebatch.errors import FlagError, UserError
from rosebatch.io.parse import Row
from rosebatch.job.workers import messages as m
from rosebatch.report.progress import Progress
from rosebatch.report.tally import Tally

# Between two signs of life.
BEAT_SECONDS = 1.0
# How long an idle worker waits for rows before it shows a sign of life.
_PAUSE_SECONDS = 0.05
# For tests: the row with this number ends the process.
_DEADLY = "ROSEBATCH_TEST_DEADLY_ROW"
_encode = msgspec.json.Encoder(enc_hook=str).encode


def main() -> NoReturn:
    """Serve the parent at the connection whose descriptor is the first argument, until it ends it."""
    # Ctrl-C in a terminal reaches all processes: the parent decides what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    serve_parent(_PipeLink(Connection(int(sys.argv[1]))))
    # To take PyTorch apart takes half a second.
    os._exit(0)


class Link(Protocol):
    """The connection to the parent, however it is made."""

    def tell(self, message: Any) -> None:
        """Send a message."""
        ...

    def hear(self, timeout: float | None = None) -> Any:
        """The next message; None if none comes in time."""
        ...

    def beat(self) -> None:
        """Show a sign of life, once a second."""
        ...


def serve_parent(link: Link) -> None:
    """Do what the parent says, until it ends it. Tell it of mistakes that make the job impossible."""
    try:
        _work(link)
    except FlagError as error:
        link.tell(m.Failed(str(error), is_usage=True))
    except UserError as error:
        link.tell(m.Failed(str(error), is_usage=False))


class _PipeLink:
    """A pipe to the parent. A thread receives, so the end of the parent ends this process in any state."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._lock = Lock()
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        self._beaten = 0.0
        Thread(target=self._receive, daemon=True).start()

    def tell(self, message: Any) -> None:
        """Send a message."""
        try:
            with self._lock:
                self._connection.send(message)
        except OSError:
            os._exit(1)

    def hear(self, timeout: float | None = None) -> Any:
        """The next message; None if none comes in time."""
        try:
            return self._inbox.get(timeout=timeout)
        except Empty:
            return None

    def beat(self) -> None:
        """Show a sign of life, once a second."""
        now = time.monotonic()
        if now - self._beaten >= BEAT_SECONDS:
            self._beaten = now
            self.tell(m.Beat())

    def _receive(self) -> None:
        try:
            while True:
                self._inbox.put(self._connection.recv())
        except (EOFError, OSError):
            os._exit(1)


def _work(link: Link) -> None:
    setup: m.Setup = link.hear()
    # PyTorch reads the environment when it is imported, and the parent goes on meanwhile.
    from rosebatch.io.reader import PromptReader
    from rosebatch.job.check import check_file
    from rosebatch.job.local import facts_of, run_rows
    from rosebatch.launch import load, plan_launch
    from rosebatch.report.build import peak_memory
    from rosebatch.report.provenance import gpu_name

    plan = plan_launch(setup.config, quiet=setup.quiet)
    link.tell(m.Planned(facts_of(plan)))
    while not isinstance(question := link.hear(), m.Load):
        if isinstance(question, m.CountBad):
            reader = PromptReader(question.source, question.defaults, question.input_format, question.result_column)
            _answer(link, lambda: str(check_file(reader, plan, sys.stderr).errors.total()))  # noqa: B023
        else:
            assert isinstance(question, m.Fingerprint), question
            Thread(target=_answer, args=(link, plan.source.fingerprint), daemon=True).start()
    launched = load(plan)
    engine = launched.engine
    link.tell(m.Ready(engine.max_num_seqs, launched.description, launched.load_seconds))
    begin: m.Begin = link.hear()
    stats, tally = engine.restart_stats(), Tally()
    output = _Pipe(link, begin, tally)
    run_rows(
        _rows(link, begin, lambda: engine.has_unfinished),
        launched,
        output,
        begin.shape,
        tally,
        Progress(None, enabled=False),
        seed=begin.seed,
        return_token_ids=begin.return_token_ids,
        check=link.beat,
    )
    link.tell(m.Done(stats, peak_memory(), gpu_name()))


def _answer(link: Link, find: Callable[[], str]) -> None:
    try:
        link.tell(m.Answer(find()))
    except UserError as error:
        link.tell(m.Answer(str(error), is_error=True))


def _rows(link: Link, begin: m.Begin, busy: Callable[[], bool]) -> Iterator[Row | None]:
    """The rows that have come; None while there is none."""
    deadly = os.environ.get(_DEADLY)
    while True:
        message = link.hear(timeout=0 if busy() else _PAUSE_SECONDS)
        if message is None:
            yield None
        elif isinstance(message, m.End):
            return
        else:
            for record in message.records:
                if deadly is not None and record.number == int(deadly):
                    os.kill(os.getpid(), signal.SIGKILL)
                yield begin.parser.parse(record)


class _Pipe:
    """An output that sends encoded results to the parent; see ``rosebatch.io.output.Output``."""

    created = 0
    kept = ""
    full = False
    fields = None

    def __init__(self, link: Link, begin: m.Begin, tally: Tally) -> None:
        self._link = link
        self._fields = begin.fields
        self._tally = tally
        self._rows: list[m.Result] = []
        self.num_rows = 0
        self.num_failed = 0

    def __contains__(self, index: int) -> bool:
        return False

    def add(self, index: int, row: dict[str, Any] | msgspec.Raw, *, failed: bool) -> None:
        """Encode a result."""
        if self._fields is not None and isinstance(row, dict):
            row = {name: value for name, value in row.items() if name in self._fields}
        self._rows.append(m.Result(index, _encode(row), failed))
        self.num_rows += 1
        self.num_failed += failed

    def flush(self) -> None:
        """Send the results so far."""
        if self._rows:
            self._link.tell(m.Results(self._rows, self._tally.take()))
            self._rows = []

    def finish(self) -> None:
        """Nothing: the parent finishes the output."""

    def close(self) -> None:
        """Nothing to release."""
