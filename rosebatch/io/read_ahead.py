"""Reading on a thread of its own, so that nothing waits for a slow disk or a slow pipe."""

import queue
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

T = TypeVar("T")

# Items in a group, and groups that may wait. Threads hand over whole groups. One ends early if it has so many bytes.
_GROUP = 64
_GROUP_BYTES = 4 << 20
_GROUPS_AHEAD = 2
# Longest wait of either thread before it checks whether to continue.
_PATIENCE_SECONDS = 0.1


def grouped(items: Iterator[T], size: Callable[[T], int], limit: int = _GROUP) -> Iterator[list[T]]:
    """Items in groups of at most so many. A group ends early if it has many bytes, by the size of each item."""
    group: list[T] = []
    total = 0
    for item in items:
        group.append(item)
        total += size(item)
        if len(group) == limit or total >= _GROUP_BYTES:
            yield group
            group, total = [], 0
    if group:
        yield group


def read_ahead(items: Iterator[T], check: Callable[[], None], size: Callable[[T], int] = lambda _: 0) -> Iterator[T]:
    """Run an iterator on a thread, some groups of items ahead.

    The iterator should only read: Python code in it holds up the other threads.

    Args:
        items: its exceptions are raised here.
        check: called again and again while no item has come; its exceptions are raised here.
        size: of an item in bytes.
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
            for group in grouped(items, size):
                if not put(group):
                    return
            put([])
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
