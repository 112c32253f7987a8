"""The order in which rows are served: the same beginnings together, and at the end the longest first."""

from array import array
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial

from rosebatch.core.token_ids import TokenIds
from rosebatch.io.images.references import ends_of
from rosebatch.io.rows import FailedRow
from rosebatch.job.lengths import ROWS_AHEAD, length_class
from rosebatch.job.prepared import DEFAULT_BYTES, END, End, Prepared, size_of
from rosebatch.text.shared_beginnings import length_in_common

# Rows that are read ahead at most. A stream holds 4,096 results that wait for an earlier row.
_MAX_AHEAD = 3072
_NO_IDS = TokenIds("I")


def in_job_order(
    items: Iterator[Prepared | FailedRow | None],
    slots: int,
    max_bytes: int = DEFAULT_BYTES,
    *,
    shares: bool = True,
    by_adapter: bool = False,
    expects_rows: Callable[[], bool] = lambda: True,
) -> Iterator[Prepared | FailedRow | None]:
    """``in_good_order`` for an engine that runs so many sequences at a time: twice as many rows are a window."""
    ahead = min(ROWS_AHEAD * slots, _MAX_AHEAD)
    return in_good_order(
        items, 2 * slots, max_bytes, ahead, shares=shares, by_adapter=by_adapter, expects_rows=expects_rows
    )


def in_good_order(
    items: Iterator[Prepared | FailedRow | None],
    window: int,
    max_bytes: int = DEFAULT_BYTES,
    ahead: int = 0,
    *,
    shares: bool = True,
    by_adapter: bool = False,
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

    Where not all adapters are on the device (``by_adapter``), rows of one follow each other before all else, in windows
    of all rows that are held. A window begins with the adapter with which the last one ended.

    A source that has None and ``expects_rows`` no more is like one that has ended, until it has a row again.
    """
    held = handed = 0
    ended = last = False
    adapter = b""
    limit = max(ahead, window)
    # Read, and in no window yet.
    waiting: deque[Prepared | FailedRow] = deque()

    def read(count: int) -> None:
        nonlocal held, ended, last
        while count > 0 and held < max_bytes and not ended:
            item = next(items, END)
            ended = isinstance(item, End)
            last = ended or (item is None and not expects_rows())
            if item is None or isinstance(item, End):
                break
            waiting.append(item)
            held += size_of(item)
            count -= 1

    def in_order(rows: Sequence[Prepared | FailedRow]) -> deque[Prepared | FailedRow]:
        # To compare what all begin with took 7 µs a row.
        behind = _not_compared(rows) if shares else 0
        begins = adapter if by_adapter else None
        return deque(sorted(rows, key=partial(_place, shares=shares, longest_first=last, behind=behind, begins=begins)))

    read(window)
    while waiting or not ended:
        if not waiting:
            yield None
            read(window)
            continue
        count = len(waiting) if last or (by_adapter and handed) else min(window, len(waiting))
        left = in_order([waiting.popleft() for _ in range(count)])
        while left:
            item = left.popleft()
            held -= size_of(item)
            handed += 1
            adapter = _adapter_of(item) if isinstance(item, Prepared) else adapter
            yield item
            del item
            if ended or (last and not expects_rows()):
                # There is none to read.
                continue
            was_last = last
            wanted = 2 if handed > window or len(waiting) + len(left) < window - 1 else 1
            read(min(wanted, limit - len(left) - len(waiting)))
            if last and (waiting or not was_last):
                left = in_order([*left, *waiting])
                waiting.clear()


def _token_ids(item: Prepared) -> TokenIds:
    """Those of the first prompt. Others than ``TokenIds`` are of no model: the engine refuses them."""
    token_ids = item.prompts[0].token_ids
    return token_ids if isinstance(token_ids, TokenIds) else _NO_IDS


def _not_compared(rows: Sequence[Prepared | FailedRow]) -> int:
    """How many token ids all of these begin with, but for those that have failed; 0 if the rests are most of them."""
    ids = [_token_ids(row) for row in rows if isinstance(row, Prepared)]
    common = length_in_common(min(ids), max(ids)) if ids else 0
    # Rests are copied.
    return common if sum(map(len, ids)) <= 2 * common * len(ids) else 0


def _adapter_of(item: Prepared) -> bytes:
    """The name of the row's adapter; empty for the model alone."""
    return (item.row.lora or "").encode(errors="replace")


def _place(
    item: Prepared | FailedRow, *, shares: bool, longest_first: bool, behind: int, begins: bytes | None = None
) -> tuple[bool, bool, bytes, int, bytes, "array[int]"]:
    """By what rows are sorted: those that have failed first, then by adapters and images, then by their token ids.

    Arrays compare as quickly as bytes where they differ early, and need no copy. With ``begins``, adapters come before
    lengths, and this one is the first.
    """
    if isinstance(item, FailedRow):
        return False, False, b"", 0, b"", _NO_IDS
    row, adapter = item.row, _adapter_of(item)
    wraps, first = (False, b"") if begins is None else (adapter < begins, adapter)
    length = -length_class(row) if longest_first else 0
    if not shares:
        return True, wraps, first, length, b"", _NO_IDS
    # Questions about one image follow each other, whatever they are; keys of one adapter are no other's.
    image = ends_of(row.images[0].source) if row.images else b""
    front = b"%s %s" % (adapter, image) if adapter else image
    token_ids = _token_ids(item)
    return True, wraps, first, length, front, token_ids[behind:] if behind else token_ids
