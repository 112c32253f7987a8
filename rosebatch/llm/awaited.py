"""Calls of coroutines: a thread serves all of them as one stream, whose rows run together."""

import asyncio
import atexit
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Lock, Thread, get_ident
from typing import Any
from weakref import WeakSet

from rosebatch.io.results import Shape
from rosebatch.io.rows import FailedRow, Row
from rosebatch.job.report.progress import Progress
from rosebatch.llm.call import Call
from rosebatch.llm.call_queue import CallQueue

# How long the thread waits for another call before it ends.
_IDLE_SECONDS = 1.0
# How long the end of Python waits for it.
_END_SECONDS = 2.0
_OPEN: "WeakSet[AwaitedCalls]" = WeakSet()


@atexit.register
def _end_all() -> None:
    for calls in [*_OPEN]:
        calls.end()


class _Awaited:
    """A call of a coroutine."""

    def __init__(self, rows: Sequence[Row | FailedRow]) -> None:
        self.rows = rows
        self.loop = asyncio.get_running_loop()
        self.future: asyncio.Future[list[Any]] = self.loop.create_future()
        self.outputs: list[Any] = [None] * len(rows)
        self.left = len(rows)

    def finish(self, error: BaseException | None = None) -> None:
        """Wake the coroutine, unless its loop is closed or it was cancelled."""
        with suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._set, error)

    def _set(self, error: BaseException | None) -> None:
        if self.future.done():
            return
        if error is not None:
            self.future.set_exception(error)
        else:
            self.future.set_result(self.outputs)


class _UntilTheEnd(Progress):
    """Ends a stream before Python ends: a thread that computes then aborts the process, such as after Ctrl-C."""

    def __init__(self, calls: "AwaitedCalls") -> None:
        super().__init__(None, enabled=False)
        self._calls = calls

    def tick(self) -> None:
        """Called after each step."""
        if self._calls.ending:
            raise RuntimeError("Python ends")


class AwaitedCalls:
    """Serves calls of coroutines, with results of one shape.

    Args:
        calls: all calls of the model.
        shape: of the results.
        require_open: raises an error once the model is closed; calls under way end with it.
    """

    def __init__(self, calls: CallQueue, shape: Shape, require_open: Callable[[], object]) -> None:
        self._calls = calls
        self._shape = shape
        self._require_open = require_open
        self._inbox: SimpleQueue[_Awaited] = SimpleQueue()
        # Place in the stream -> call, and place there.
        self._pending: dict[int, tuple[_Awaited, int]] = {}
        # Without all of their results.
        self._open: set[_Awaited] = set()
        self._lock = Lock()
        self._thread: Thread | None = None
        self.ending = False
        _OPEN.add(self)

    def end(self) -> None:
        """Let the thread end after its step. One that waits for a call may stay."""
        self.ending = True
        if self._open and (thread := self._thread) is not None:
            thread.join(_END_SECONDS)

    async def outputs(self, rows: Sequence[Row | FailedRow]) -> list[Any]:
        """The results of rows, in order. Rows of a call that is cancelled may be computed, and their results dropped.

        Raises:
            RuntimeError: they would wait for another call of this thread.
        """
        if not rows:
            return []
        self._calls.require_no_wait_for(get_ident())
        awaited = _Awaited(rows)
        with self._lock:
            self._inbox.put(awaited)
            if self._thread is None:
                self._thread = Thread(target=self._serve, name="rosebatch-await", daemon=True)
                self._thread.start()
        return await awaited.future

    def _serve(self) -> None:
        while not self.ending:
            try:
                first = self._inbox.get(timeout=_IDLE_SECONDS)
            except Empty:
                with self._lock:
                    if self._inbox.empty():
                        self._thread = None
                        return
                continue
            self._open.add(first)
            try:
                call = Call(self._rows(first), self._shape, progress=_UntilTheEnd(self))
                for found in self._calls.outputs(call):
                    for place, output in found:
                        self._take(place, output)
            except BaseException as error:
                for awaited in self._open:
                    awaited.finish(error)
                self._open.clear()
                self._pending.clear()

    def _take(self, place: int, output: Any) -> None:
        awaited, own = self._pending.pop(place)
        awaited.outputs[own] = output
        awaited.left -= 1
        if not awaited.left:
            self._open.remove(awaited)
            awaited.finish()

    def _rows(self, awaited: _Awaited | None) -> Iterator[Row | FailedRow | None]:
        """The rows of all calls, until none is left, or another one waits for this stream to end."""
        place = 0
        while awaited is not None or self._pending:
            self._require_open()
            if awaited is not None:
                for own, row in enumerate(awaited.rows):
                    if awaited.future.cancelled():
                        self._open.remove(awaited)
                        break
                    self._pending[place] = awaited, own
                    place += 1
                    yield row
            awaited = None
            if not self._calls.others_wait:
                with suppress(Empty):
                    awaited = self._inbox.get(block=False)
                    self._open.add(awaited)
            if awaited is None:
                yield None
