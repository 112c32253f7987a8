"""Waiting for other threads and processes, as long as a slow machine takes."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")

# Only a test that fails waits so long: a start of Ray takes 15 s of a processor, which may be ten times slower and
# shared. What a test must not wait for takes longer than this.
PATIENCE_SECONDS = 900.0


def until(done: Callable[[], T]) -> T:
    """Wait until a condition holds; returns its value."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not (found := done()):
        assert time.monotonic() < end, "waited for ever"
        time.sleep(0.01)
    return found


@contextmanager
def no_thread_left(name: str = "") -> Iterator[None]:
    """Require that all threads with such a name that start inside end. Threads of earlier tests do not count."""
    before = set(threading.enumerate())
    yield
    until(lambda: not [t for t in set(threading.enumerate()) - before if t.name.startswith(name)])
