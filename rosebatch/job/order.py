"""The order in which rows are served: the same beginnings together, and at the end the longest first."""

from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain

from rosebatch.io.rows import FailedRow
from rosebatch.job.lengths import length_class
from rosebatch.job.prepare import DEFAULT_BYTES, END, End, Prepared, PreparedRow, size_of


def in_good_order(
    items: Iterator[Prepared | None], window: int, most_bytes: int = DEFAULT_BYTES, ahead: int = 0
) -> Iterator[Prepared | None]:
    """Reorder a window of rows at a time, so that prompts with the same beginning follow each other.

    Its blocks are then computed once and are still there for the next prompt, however small the KV cache is. For each
    row handed out, another is read: reading a whole window at once would keep the device waiting. Rows of many bytes
    make a window smaller, so that all rows held have about ``most_bytes``. A window ends early where no row comes at
    the moment; None is handed on if none is held.

    Once the last row is read, those that may become the longest go first: a long one begun last would run alone
    (source: Graham 1969, Bounds on multiprocessing timing anomalies). The more rows are held then, the better. So once
    the first window is handed out, two rows are read for each, until ``ahead`` are held.
    """
    held = handed = 0
    ended = False
    most = max(ahead, window)
    # Read, and in no window yet.
    waiting: deque[Prepared] = deque()

    def read(count: int) -> None:
        nonlocal held, ended
        while count > 0 and held < most_bytes and not ended:
            item = next(items, END)
            if item is None:
                break
            if isinstance(item, End):
                ended = True
                break
            held += size_of(item)
            waiting.append(item)
            count -= 1

    read(window)
    while waiting or not ended:
        if not waiting:
            yield None
            read(window)
            continue
        count = len(waiting) if ended else min(window, len(waiting))
        left = _ordered([waiting.popleft() for _ in range(count)], longest_first=ended)
        while left:
            item = left.popleft()
            held -= size_of(item)
            handed += 1
            yield item
            del item
            if ended:
                continue
            wanted = 2 if handed > window or len(waiting) + len(left) < window - 1 else 1
            read(min(wanted, most - len(left) - len(waiting)))
            if ended:
                left = _ordered([*left, *waiting], longest_first=True)
                waiting.clear()


def _ordered(rows: Iterable[Prepared], *, longest_first: bool) -> deque[Prepared]:
    failed, served = list[Prepared](), list[PreparedRow]()
    for row in rows:
        if isinstance(row, FailedRow):
            failed.append(row)
        else:
            served.append(row)
    served.sort(key=_beginning)
    if longest_first:
        served.sort(key=lambda row: length_class(row.row), reverse=True)
    return deque(chain(failed, served))


def _beginning(row: PreparedRow) -> bytes:
    """Bytes compare quickly; which order of tokens they stand for does not matter."""
    try:
        return array("q", row.prompts[0].token_ids).tobytes()
    except OverflowError:
        # No token ids of any model: the engine refuses them.
        return b""
