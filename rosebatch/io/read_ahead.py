"""Reading on a thread of its own, so that neither a slow disk nor a slow pipe keeps the rest waiting."""

import queue
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import TypeVar

T = TypeVar("T")

# Items that are handed over at a time, and such groups waiting.
_GROUP = 64
_GROUPS_AHEAD = 2
# Between two looks at whether to go on.
_PATIENCE_SECONDS = 0.1


def read_ahead(items: Iterator[T], check: Callable[[], None]) -> Iterator[T]:
    """Run an iterator on a thread, some groups of items ahead.

    It should do no more than read: what it computes in Python, it keeps others from computing.

    Args:
        items: what it raises is raised here.
        check: called while there is nothing to do but wait; what it raises is raised here.
    """
    ahead: queue.Queue[list[T] | BaseException] = queue.Queue(maxsize=_GROUPS_AHEAD)
    stopped = threading.Event()

    def put(group: list[T] | BaseException) -> bool:
        while not stopped.is_set():
            try:
                ahead.put(group, timeout=_PATIENCE_SECONDS)
                return True
            except queue.Full:
                continue
        return False

    def work() -> None:
        try:
            while put(group := list(islice(items, _GROUP))) and group:
                pass
        except BaseException as error:
            put(error)

    threading.Thread(target=work, name="rosebatch-read", daemon=True).start()
    try:
        while True:
            try:
                group = ahead.get(timeout=_PATIENCE_SECONDS)
            except queue.Empty:
                check()
                continue
            if isinstance(group, BaseException):
                raise group
            if not group:
                return
            yield from group
    finally:
        stopped.set()
