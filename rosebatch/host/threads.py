"""Work on threads that nobody waits for when the run ends."""

import os
import time
import weakref
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, Executor, Future
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Condition, Thread
from typing import Any, TypeVar

T = TypeVar("T")

# Longest wait for a thread that may be busy; after it, the caller checks whether to continue.
_PATIENCE_SECONDS = 0.1

_Job = tuple[Future[Any], Callable[[], Any]] | None


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class DaemonPool(Executor):
    """Some threads that take calls in order.

    Unlike those of a ``ThreadPoolExecutor``, nothing joins them: neither ``with`` nor the end of the process waits for
    a call that takes minutes.
    """

    def __init__(self, limit: int, name: str) -> None:
        self._limit = limit
        self._name = name
        self._jobs: SimpleQueue[_Job] = SimpleQueue()
        self._threads: list[Thread] = []
        # Not ``__del__``: once the process ends, what that would call may be gone.
        weakref.finalize(self, _end, self._jobs, limit).atexit = False

    def submit(self, call: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        """Run a call on one of the threads."""
        future: Future[T] = Future()
        self._jobs.put((future, lambda: call(*args, **kwargs)))
        if len(self._threads) < self._limit:
            name = f"{self._name}-{len(self._threads)}"
            thread = Thread(target=_work, args=(self._jobs,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = True) -> None:
        """Drop the calls that have not begun. Threads end after those that have; a tenth of a second is waited."""
        _end(self._jobs, self._limit)
        end = time.monotonic() + _PATIENCE_SECONDS
        for thread in self._threads if wait else ():
            thread.join(max(0.0, end - time.monotonic()))
        self._threads.clear()


def _end(jobs: SimpleQueue[_Job], limit: int) -> None:
    """Drop the calls that have not begun, and end the threads after the others."""
    with suppress(Empty):
        while job := jobs.get_nowait():
            job[0].cancel()
    # Of a start that was interrupted, the thread is not known.
    for _ in range(limit):
        jobs.put(None)


def in_background(call: Callable[[], T]) -> Callable[[], T]:
    """Run a call on a thread of its own. The returned function waits for it, then returns or raises what it did."""
    future: Future[T] = Future()
    Thread(target=_finish, args=(future, call), daemon=True).start()
    return future.result


def on_thread(
    items: Iterable[T], limit: int, patience: float, name: str, weight: Callable[[T], int] = lambda _: 1
) -> Generator[T | None, None, None]:
    """Run an iterator on a thread, so many items ahead.

    Args:
        items: run on the thread.
        limit: no item is begun while those that wait, and the one in use, have together this weight.
        patience: seconds.
        name: of the thread.
        weight: of an item.

    Yields:
        Its items in order; None whenever none has come for ``patience`` seconds. Its exceptions are raised here.
    """
    ahead: SimpleQueue[T | BaseException | None] = SimpleQueue()
    changed, waiting, stopped = Condition(), 0, False

    def goes_on() -> bool:
        return stopped or waiting < limit

    def work() -> None:
        nonlocal waiting
        try:
            for item in items:
                with changed:
                    waiting += weight(item)
                    ahead.put(item)
                    # Else it would be here until the next one.
                    del item
                    changed.wait_for(goes_on)
                if stopped:
                    return
            ahead.put(None)
        except BaseException as error:
            ahead.put(error)

    def change(*, by: int = 0, stops: bool = False) -> None:
        nonlocal waiting, stopped
        with changed:
            waiting, stopped = waiting - by, stops
            changed.notify()

    Thread(target=work, name=name, daemon=True).start()
    try:
        while True:
            try:
                found = ahead.get(timeout=patience)
            except Empty:
                yield None
                continue
            if isinstance(found, BaseException):
                raise found
            if found is None:
                return
            own = weight(found)
            yield found
            del found
            change(by=own)
    finally:
        change(stops=True)


def _work(jobs: SimpleQueue[_Job]) -> None:
    while job := jobs.get():
        future, call = job
        if future.set_running_or_notify_cancel():
            _finish(future, call)
        # Else this thread would keep the last result until its next call.
        del job, future, call


def _finish(future: Future[Any], call: Callable[[], Any]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:
        future.set_exception(error)


def wait_for(future: Future[T], check: Callable[[], None]) -> T:
    """The result of a call.

    Args:
        future: of the call; its exception is raised here.
        check: called again and again meanwhile; what it raises ends the wait.
    """
    while not done_within(future, _PATIENCE_SECONDS):
        check()
    return future.result()


def done_within(future: Future[Any], seconds: float) -> bool:
    """Whether a call ends in so many seconds."""
    try:
        # ``wait`` makes four objects that lock.
        future.exception(seconds)
    except TimeoutError:
        return False
    except CancelledError:
        pass
    return True
