"""The order in which rows are served: the same beginnings together, and at the end the longest first."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator

import msgspec

from rosebatch.core.token_ids import TokenIds
from rosebatch.io.rows import FailedRow
from rosebatch.job.lengths import ROWS_AHEAD, length_class
from rosebatch.job.prepared import DEFAULT_BYTES, END, End, Prepared, size_of

# Rows that are read ahead at most. A stream holds 4,096 results that wait for an earlier row.
_MAX_AHEAD = 3072
# Of a prompt, its first tokens. One with more is refused by the models that there are.
_COMPARED = 1 << 20
# Of an image's source, characters at both ends: data URLs of photos differ at their ends.
_OF_SOURCE = 64


def in_job_order(
    items: Iterator[Prepared | FailedRow | None],
    slots: int,
    max_bytes: int = DEFAULT_BYTES,
    *,
    shares: bool = True,
    expects_rows: Callable[[], bool] = lambda: True,
) -> Iterator[Prepared | FailedRow | None]:
    """``in_good_order`` for an engine that runs so many sequences at a time: twice as many rows are a window."""
    ahead = min(ROWS_AHEAD * slots, _MAX_AHEAD)
    return in_good_order(items, 2 * slots, max_bytes, ahead, shares=shares, expects_rows=expects_rows)


def in_good_order(
    items: Iterator[Prepared | FailedRow | None],
    window: int,
    max_bytes: int = DEFAULT_BYTES,
    ahead: int = 0,
    *,
    shares: bool = True,
    expects_rows: Callable[[], bool] = lambda: True,
) -> Iterator[Prepared | FailedRow | None]:
    """Reorder a window of rows at a time, so that prompts with the same beginning follow each other.

    Its blocks are then computed once and are still there for the next prompt, however small the KV cache is. For each
    row handed out, another is read: reading a whole window at once would keep the device waiting. Rows of many bytes
    make a window smaller, so that all rows held have about ``max_bytes``. A window ends early where no row comes at
    the moment; None is handed on if none is held.

    Once the last row is read, those that may become the longest go first: a long one begun last would run alone
    (source: Graham 1969, Bounds on multiprocessing timing anomalies). The more rows are held then, the better. So once
    the first window is handed out, two rows are read for each, until ``ahead`` are held.

    Where prompts do not share what is computed for their beginnings (``shares``), only this second rule counts.

    A source that has None and ``expects_rows`` no more is like one that has ended, until it has a row again.
    """
    held = handed = 0
    ended = last = False
    limit = max(ahead, window)
    # Read, and in no window yet.
    waiting: deque[_Held] = deque()

    def read(count: int) -> None:
        nonlocal held, ended, last
        while count > 0 and held < max_bytes and not ended:
            item = next(items, END)
            ended = isinstance(item, End)
            last = ended or (item is None and not expects_rows())
            if item is None or isinstance(item, End):
                break
            # Now, not when rows are sorted: for thousands of long prompts that takes longer than launched steps.
            beginning = _beginning(item) if shares else b""
            size = size_of(item) + len(beginning)
            waiting.append(_Held(item, beginning, size))
            held += size
            count -= 1

    read(window)
    while waiting or not ended:
        if not waiting:
            yield None
            read(window)
            continue
        count = len(waiting) if last else min(window, len(waiting))
        left = _ordered([waiting.popleft() for _ in range(count)], longest_first=last)
        while left:
            row = left.popleft()
            held -= row.size
            handed += 1
            yield row.item
            del row
            if ended or (last and not expects_rows()):
                # There is none to read.
                continue
            was_last = last
            wanted = 2 if handed > window or len(waiting) + len(left) < window - 1 else 1
            read(min(wanted, limit - len(left) - len(waiting)))
            if last and (waiting or not was_last):
                left = _ordered([*left, *waiting], longest_first=True)
                waiting.clear()


class _Held(msgspec.Struct):
    """A row, what its prompt begins with as bytes, which compare quickly in whichever order, and the bytes of both."""

    item: Prepared | FailedRow
    beginning: bytes
    size: int


def _ordered(rows: Iterable[_Held], *, longest_first: bool) -> deque[_Held]:
    """Sorted; those that have failed first."""

    def place(held: _Held) -> tuple[bool, int, bytes]:
        item = held.item
        if isinstance(item, FailedRow):
            return False, 0, b""
        return True, -length_class(item.row) if longest_first else 0, held.beginning

    return deque(sorted(rows, key=place))


def _beginning(item: Prepared | FailedRow) -> bytes:
    if isinstance(item, FailedRow):
        return b""
    front = b""
    if item.row.images:
        # Questions about one image follow each other, whatever they are.
        image = item.row.images[0].source
        front = f"{image[:_OF_SOURCE]} {image[-_OF_SOURCE:]}".encode(errors="surrogatepass") if image else b""
    try:
        found = TokenIds.of(item.prompts[0].token_ids)
        return front + (found if len(found) <= _COMPARED else found[:_COMPARED]).tobytes()
    except OverflowError:
        # No token ids of any model: the engine refuses them.
        return b""
