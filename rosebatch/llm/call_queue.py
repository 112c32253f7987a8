"""Calls of several threads that share a model: whoever waits for results takes the next step for all."""

import pickle
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import Any

from rosebatch.io.images.policy import NO_MEDIA, MediaPolicy
from rosebatch.io.output import Sink
from rosebatch.io.results import Result
from rosebatch.io.rows import FailedRow, Row
from rosebatch.llm.backend import Backend
from rosebatch.llm.call import Call
from rosebatch.llm.results import serving

# Between two looks at whether a stream has another row, if there is nothing else to do.
_PATIENCE_SECONDS = 0.002
_BUSY = "this LLM is busy: finish or close its other call first"
_INTERRUPTED = "this call ended with another one, which was interrupted"


class CallQueue(Sink):
    """Gives rows of calls to a backend, in turns, and results to the calls. It is the shape of these results, too.

    A call joins those under way if the backend can do that and its seed is theirs. Else it waits until they are done,
    and calls that come later wait behind it.

    Ctrl-C may raise an exception after any call of a function here. So each change is made before what it replaces
    goes, and may be made twice.
    """

    def __init__(self, backend: Backend, media: MediaPolicy = NO_MEDIA) -> None:
        self._backend = backend
        self._media = media
        self._lock = Lock()
        self._waiting: deque[Call] = deque()
        # Others may begin while a thread looks through them: it takes a copy.
        self._open: dict[Call, None] = {}
        self._steps: Generator[None, None, None] | None = None
        # The call whose thread takes a step.
        self._leader: Call | None = None
        self._asleep: dict[Call, None] = {}
        self._places: dict[int, tuple[Call, int]] = {}
        # Their progress is to be watched: between two steps, for a look reads what a step changes.
        self._begun: deque[Call] = deque()

    @property
    def others_wait(self) -> bool:
        """Whether a call waits for those under way to end."""
        return bool(self._waiting)

    def require_no_wait_for(self, thread: int) -> None:
        """Check that a call with no seed of its own, of a coroutine in a thread, need not wait for that thread.

        Raises:
            RuntimeError: a call of the thread has to end before.
        """
        with self._lock:
            own = [each for each in self._open if each.thread == thread]
        if any(each.alone or each.seed is not None or not self._backend.joins for each in own):
            raise RuntimeError(_BUSY)

    def outputs(self, call: Call) -> Generator[list[tuple[int, Any]], None, None]:
        """The results of a call as they are ready, some at a time, with the places of their rows.

        Closing drops what is unfinished.

        Raises:
            RuntimeError: it would wait for another call of this thread.
        """
        try:
            self._waiting.append(call)
            while not call.over:
                self._wait_until(call, lambda: call.ready)
                yield call.take()
        finally:
            try:
                self._leave(call)
            except BaseException:
                # An interrupt came meanwhile.
                self._leave(call)
                raise

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Nobody else uses the model meanwhile.

        Raises:
            RuntimeError: it would wait for another call of this thread.
        """
        call = Call(alone=True)
        try:
            self._waiting.append(call)
            self._wait_until(call, lambda: call in self._open)
            yield
        finally:
            try:
                self._leave(call)
            except BaseException:
                # An interrupt came meanwhile.
                self._leave(call)
                raise

    def _wait_until(self, call: Call, ready: Callable[[], bool]) -> None:
        """Take steps, or sleep while another thread does, until something is so."""
        while True:
            with self._lock:
                self._asleep.pop(call, None)
                self._admit()
                if ready():
                    # This thread may be away for long.
                    self._wake_one()
                    return
                if call not in self._open and any(each.thread == call.thread for each in self._open):
                    raise RuntimeError(_BUSY)
                leads = self._steps is not None and self._leader is None
                if leads:
                    self._leader = call
                else:
                    self._asleep[call] = None
            if leads:
                self._step()
            else:
                call.wake.get()

    def _admit(self) -> None:
        """Let calls begin whose turn it is."""
        while self._waiting:
            call, first = self._waiting[0], next(iter(self._open), None)
            if first is None and self._steps is not None:
                # What others have left behind ends first.
                return
            alone = call.alone or (first is not None and first.alone) or not self._backend.joins
            if first is not None and (alone or call.seed != first.seed):
                return
            self._open[call] = None
            if self._steps is None and not call.alone:
                self._steps = self._begin(call)
            self._begun.append(call)
            if call.alone and call in self._asleep:
                self._wake(call)
            self._waiting.popleft()

    def _begin(self, call: Call) -> Generator[None, None, None]:
        if self._backend.joins:
            how = serving(self, call.seed, self._media, in_order=call.is_stream)
            return self._backend.run(self._rows(), how, self, lambda: any(each.expects_rows for each in [*self._open]))
        assert call.shape is not None, "it has rows"
        rows: Iterable[Row | FailedRow | None] = self._rows_of(call)
        if not call.is_stream:
            rows = [row for row in rows if row is not None]
        how = serving(call.shape, call.seed, self._media, in_order=call.is_stream)
        return self._backend.run(rows, how, self, lambda: True)

    def _rows(self) -> Iterator[Row | FailedRow | None]:
        """One of each call, in turns; None if there is none at the moment."""
        while calls := [*self._open]:
            drawn = False
            for call in calls:
                if (row := self._draw(call)) is not None:
                    drawn = True
                    yield row
            if not drawn:
                if not self._places:
                    time.sleep(_PATIENCE_SECONDS)
                yield None

    def _rows_of(self, call: Call) -> Iterator[Row | FailedRow | None]:
        while call.expects_rows:
            row = self._draw(call)
            if row is None and call.expects_rows:
                time.sleep(_PATIENCE_SECONDS)
            yield row

    def _draw(self, call: Call) -> Row | FailedRow | None:
        if (row := call.draw()) is not None:
            self._places[row.index] = call, call.drawn - 1
        return row

    def _step(self) -> None:
        """Take one step for all calls under way. If it fails, it fails for all."""
        steps = self._steps
        assert steps is not None, "there is something to do"
        try:
            while self._begun:
                self._begun.popleft().progress.watch(self._backend.outlook)
            if self._open:
                next(steps)
                for call in [*self._open]:
                    call.progress.tick()
            else:
                self._finish(steps)
        except StopIteration:
            self._end_run()
        except BaseException as failure:
            try:
                # Its own errors have ended it, those of progress have not.
                steps.close()
            finally:
                self._end_run(failure if isinstance(failure, Exception) else None)
            if not isinstance(failure, Exception):
                raise
        finally:
            with self._lock:
                self._leader = None
                for call in [each for each in self._asleep if each.ready]:
                    self._wake(call)

    def _finish(self, steps: Generator[None, None, None]) -> None:
        """End what calls that have left have begun."""
        if self._places:
            steps.close()
        else:
            for _ in steps:
                pass
        self._end_run()

    def _end_run(self, error: Exception | None = None) -> None:
        """End all calls under way. Without an error, those that miss results were interrupted."""
        with self._lock:
            for call in self._open:
                call.end(error if error is not None or call.done else RuntimeError(_INTERRUPTED))
            self._steps = None
            self._open.clear()
            self._places.clear()

    def _leave(self, call: Call) -> None:
        call.end()
        with self._lock:
            if call in self._waiting:
                self._waiting.remove(call)
            self._open.pop(call, None)
            self._asleep.pop(call, None)
            if self._leader is call:
                self._leader = None
            over = self._steps is not None and not self._open and self._leader is None
            if over:
                self._leader = call
        if over:
            self._step()
        with self._lock:
            self._wake_one()

    def _wake_one(self) -> None:
        """Somebody has to take the next step."""
        if self._asleep and self._leader is None:
            self._wake(next(iter(self._asleep)))

    def _wake(self, call: Call) -> None:
        call.wake.put(None)
        self._asleep.pop(call, None)

    def add(self, index: int, row: Any, *, failed: bool) -> None:
        """See ``Sink``."""
        call, place = self._places.pop(index)
        call.put(place, row)

    def add_lines(self, indices: Sequence[int], lines: Sequence[bytes], failed: Collection[int]) -> None:
        """See ``Sink``."""
        for index, line in zip(indices, lines, strict=True):
            self.add(index, pickle.loads(line), failed=False)

    def result(self, result: Result) -> Any:
        """See ``Shape``."""
        shape = self._places[result.row.index][0].shape
        assert shape is not None, "it has rows"
        return shape.result(result)

    def failure(self, row: FailedRow) -> Any:
        """See ``Shape``."""
        shape = self._places[row.index][0].shape
        assert shape is not None, "it has rows"
        return shape.failure(row)
