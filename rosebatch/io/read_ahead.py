"""Reading on a thread of its own, so that nothing waits for a slow disk or a slow pipe."""

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import TypeVar

from rosebatch.host.threads import on_thread

T = TypeVar("T")

# Items in a group, and groups that may be there, the one in use included. Threads hand over whole groups. One ends
# early if it has so many bytes, and counts as one more for each so many.
_GROUP = 64
GROUP_BYTES = 4 << 20
_GROUPS = 4
# Longest wait for a group before it is checked whether to continue.
_PATIENCE_SECONDS = 0.1


def grouped(
    items: Iterator[T], size: Callable[[T], int], limit: int = _GROUP, max_bytes: int = GROUP_BYTES
) -> Iterator[list[T]]:
    """Items in groups of at most so many. A group ends early if it has so many bytes, by the size of each item."""
    group: list[T] = []
    total = 0
    for item in items:
        group.append(item)
        total += size(item)
        # The group alone has it: whoever takes it from there lets it go.
        del item
        if len(group) == limit or total >= max_bytes:
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

    def weight(group: list[T]) -> int:
        return 1 + sum(map(size, group)) // GROUP_BYTES

    ahead = on_thread(grouped(items, size), _GROUPS, _PATIENCE_SECONDS, "rosebatch-read", weight)
    with closing(ahead) as groups:
        for group in groups:
            if group is None:
                check()
                continue
            group.reverse()
            while group:
                # Parsed, a row must not be here as it was read, too.
                yield group.pop()
