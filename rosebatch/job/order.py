"""The order in which rows are served: the same beginnings together, and at the end the longest first."""

import math
from array import array
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain

from rosebatch.io.rows import FailedRow
from rosebatch.job.prepare import DEFAULT_BYTES, END, End, Prepared, PreparedRow, size_of

# Of the last rows, those whose lengths differ by less than this share of an octave keep their order.
_CLASSES_AN_OCTAVE = 2


def in_good_order(
    items: Iterator[Prepared | None], window: int, most_bytes: int = DEFAULT_BYTES
) -> Iterator[Prepared | None]:
    """Reorder a window of rows at a time, so that prompts with the same beginning follow each other.

    Its blocks are then computed once and are still there for the next prompt, however small the KV cache is. For each
    row handed out, one row of the next window is read: reading a whole window at once would keep the device waiting.
    Rows of many bytes make a window smaller, so that both windows together hold about ``most_bytes``. A window ends
    early where no row comes at the moment; None is handed on if none is held.

    Once the last row is read, those that may become the longest go first: a long one begun last would run alone
    (source: Graham 1969, Bounds on multiprocessing timing anomalies).
    """
    held = 0
    ended = False

    def read(most: int) -> list[Prepared]:
        nonlocal held, ended
        found: list[Prepared] = []
        while len(found) < most and held < most_bytes and not ended:
            item = next(items, END)
            if item is None:
                break
            if isinstance(item, End):
                ended = True
                break
            held += size_of(item)
            found.append(item)
        return found

    group = read(window)
    while group or not ended:
        if not group:
            yield None
            group = read(window)
            continue
        left = _ordered(group, longest_first=ended)
        group = []
        while left:
            item = left.popleft()
            held -= size_of(item)
            yield item
            del item
            if ended:
                continue
            # Two, if rows of many bytes have left room for more of others.
            group += read(min(2, window - len(left) - len(group)))
            if ended:
                left, group = _ordered([*left, *group], longest_first=True), []


def _ordered(rows: Iterable[Prepared], *, longest_first: bool) -> deque[Prepared]:
    failed, served = list[Prepared](), list[PreparedRow]()
    for row in rows:
        if isinstance(row, FailedRow):
            failed.append(row)
        else:
            served.append(row)
    served.sort(key=_beginning)
    if longest_first:
        served.sort(key=_length_class, reverse=True)
    return deque(chain(failed, served))


def _beginning(row: PreparedRow) -> bytes:
    """Bytes compare quickly; which order of tokens they stand for does not matter."""
    try:
        return array("q", row.prompts[0].token_ids).tobytes()
    except OverflowError:
        # No token ids of any model: the engine refuses them.
        return b""


def _length_class(row: PreparedRow) -> int:
    """Grows with the most tokens that a completion of the row may have."""
    return 0 if row.row.pooling is not None else int(_CLASSES_AN_OCTAVE * math.log2(row.row.sampling.max_tokens))
