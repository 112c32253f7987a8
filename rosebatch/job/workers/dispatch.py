"""Which worker serves which rows. Plain bookkeeping: no process, no clock.

Workers pull: each has credit for so many rows. Towards the end of a job credits shrink, so that no worker has rows
waiting that another could begin. Rows travel in chunks, which are divided only where that matters.

The last rows go out by length, the longest first: a long one begun last would run alone. They are dealt like cards, as
many hands as there are workers, so that no worker has all of the long ones.

A worker that dies gives its rows back. One of them may have killed it, so they go out again in groups that run alone on
a worker, as many as it computes at a time. A group that kills again is divided. One death may have another cause: a row
has failed when several workers died with this row alone.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from rosebatch.io.parse import Record
from rosebatch.job.lengths import ROWS_AHEAD
from rosebatch.job.workers.chunk import MAX_ROWS, Chunk, in_chunks

# Groups into which rows are divided that killed a worker alone.
_GROUPS = 8
# Workers that die with one row alone before that row has failed.
_DEATHS = 3
# Of rows that are read and not handed out yet.
_MAX_BYTES_READ = 64 << 20
# Rows that are dealt by length. To look at one takes the parent some 8 µs.
_MAX_DEALT = 1 << 15


@dataclass(slots=True)
class _Worker:
    """The rows that a worker has: for each number, the chunk that it came in."""

    slots: int
    rows: dict[int, Chunk] = field(default_factory=dict)
    size: int = 0
    alone: bool = False


class Dispatcher:
    """The rows of a job, from being read to being answered.

    Args:
        workers: that join sooner or later.
        max_bytes: of the rows that one worker has. A larger row goes out by itself.
        length_of: grows with the time that a row may take. It is asked for the last rows only.
    """

    def __init__(self, workers: int, max_bytes: int, length_of: Callable[[Record], int] = lambda record: 0) -> None:
        self._expected = workers
        self._max_bytes = max_bytes
        self._length_of = length_of
        self._workers: dict[int, _Worker] = {}
        # Rows that are read and not handed out: chunks, or in the end hands of rows.
        self._fresh: deque[Chunk] = deque()
        self._hands: list[deque[Record]] = []
        self._suspects: deque[Chunk] = deque()
        # Workers that died with a row alone, by its number.
        self._deaths: Counter[int] = Counter()
        self._ended = self._dealt = False
        # Of all workers so far, the most; and sums, so that no call takes longer with more workers.
        self._max_slots = 0
        self._num_fresh = 0
        self._fresh_bytes = 0
        self._num_suspects = 0
        self._num_busy = 0

    def join(self, worker: int, slots: int) -> None:
        """A worker is ready for rows; it computes ``slots`` of them at a time."""
        self._workers[worker] = _Worker(slots)
        self._max_slots = max(self._max_slots, slots)

    def lose(self) -> None:
        """One worker will not join again."""
        self._expected -= 1

    def offer(self, chunks: Iterable[Chunk]) -> None:
        """Take rows that were read."""
        for chunk in chunks:
            self._fresh.append(chunk)
            self._num_fresh += len(chunk)
            self._fresh_bytes += chunk.size

    def end(self) -> None:
        """No more rows will be offered."""
        self._ended = True

    def _deal(self) -> None:
        """Deal the fresh rows by length; those that are all alike stay next to their neighbours."""
        self._dealt = True
        rows = [record for chunk in self._fresh for record in chunk.records]
        lengths = {record.number: self._length_of(record) for record in rows}
        if len(set(lengths.values())) > 1:
            rows.sort(key=lambda record: lengths[record.number], reverse=True)
            self._fresh.clear()
            number = max(1, self._expected)
            self._hands = [deque(rows[first::number]) for first in range(number)]

    @property
    def wants(self) -> bool:
        """Whether more rows should be read: as many as it takes to divide the last ones well."""
        slots = self._max_slots * self._expected
        limit = max(2 * slots, min(ROWS_AHEAD * slots, _MAX_DEALT), MAX_ROWS)
        return not self._ended and self._num_fresh < limit and self._fresh_bytes < _MAX_BYTES_READ

    @property
    def finished(self) -> bool:
        """Whether all rows are answered."""
        return self._ended and not self._left

    @property
    def busy(self) -> int:
        """Rows that workers have."""
        return self._num_busy

    @property
    def _left(self) -> int:
        return self._num_fresh + self._num_suspects + self._num_busy

    def by_load(self) -> list[int]:
        """The workers, those with the fewest rows first."""
        return sorted(self._workers, key=lambda worker: len(self._workers[worker].rows))

    def take(self, worker: int) -> list[Chunk]:
        """The rows that a worker gets now, perhaps none."""
        own = self._workers[worker]
        if own.alone and own.rows:
            return []
        own.alone = bool(self._suspects) and not own.rows
        if own.alone:
            chunks = [self._suspects.popleft()]
            self._num_suspects -= len(chunks[0])
        else:
            chunks = self._next_fresh(own)
        for chunk in chunks:
            own.rows.update(dict.fromkeys(chunk.numbers, chunk))
            own.size += chunk.mean_size * len(chunk)
            self._num_busy += len(chunk)
        return chunks

    def _next_fresh(self, own: _Worker) -> list[Chunk]:
        if self._ended and not self._dealt and self._num_fresh <= _MAX_DEALT:
            self._deal()
        credit = 2 * own.slots
        if self._ended:
            credit = min(credit, -(-self._left // self._expected))
        room = credit - len(own.rows)
        # Half of the slots' rows still wait there when a chunk is sent, so no slot is empty until it arrives.
        minimum = min(MAX_ROWS, max(1, own.slots // 2), credit)
        if room < minimum and room < self._num_fresh and own.rows:
            # Else neighbours would go to different workers, one by one.
            return []
        space = self._max_bytes - own.size
        return self._from_hands(own, room, space) if self._hands else self._from_chunks(own, room, space)

    def _from_hands(self, own: _Worker, room: int, space: int) -> list[Chunk]:
        """From the fullest hand, then from others: what is left is divided as evenly as before."""
        rows: list[Record] = []
        self._hands.sort(key=len, reverse=True)
        for hand in self._hands:
            while hand and len(rows) < room and (hand[0].size <= space or not (rows or own.rows)):
                space -= hand[0].size
                rows.append(hand.popleft())
            if hand:
                break
        self._hands = [hand for hand in self._hands if hand]
        self._num_fresh -= len(rows)
        self._fresh_bytes -= sum(record.size for record in rows)
        return list(in_chunks(rows))

    def _from_chunks(self, own: _Worker, room: int, space: int) -> list[Chunk]:
        chunks: list[Chunk] = []
        while self._fresh and room > 0:
            first = self._fresh.popleft()
            rows = first.rows_within(room, space)
            if chunks and rows < len(first) and not self._ended:
                # Its turn comes as a whole.
                rows = 0
            elif not chunks and not own.rows:
                rows = max(rows, 1)
            if not rows:
                self._fresh.appendleft(first)
                break
            if rows < len(first):
                first, rest = first.split(rows)
                self._fresh.appendleft(rest)
            chunks.append(first)
            room, space = room - len(first), space - first.size
            self._num_fresh -= len(first)
            self._fresh_bytes -= first.size
        return chunks

    def answered(self, worker: int, numbers: Collection[int]) -> None:
        """A worker has answered rows."""
        own = self._workers[worker]
        take = own.rows.pop
        own.size -= sum([take(number).mean_size for number in numbers])
        self._num_busy -= len(numbers)

    def died(self, worker: int) -> list[Record]:
        """A worker is gone: its rows wait for others. Returns the rows that have failed: one, or none."""
        own = self._workers.pop(worker)
        rows = _rows_of(own)
        self._num_busy -= len(rows)
        if own.alone and len(rows) == 1:
            self._deaths[rows[0].number] += 1
            if self._deaths[rows[0].number] == _DEATHS:
                return rows
        # At first as many as run at a time: smaller groups would leave slots empty, and most deaths have other causes.
        size = max(1, -(-len(rows) // _GROUPS) if own.alone else own.slots)
        self._suspects.extend(in_chunks(rows, size))
        self._num_suspects += len(rows)
        return []


def _rows_of(worker: _Worker) -> list[Record]:
    """The rows that a worker has, in order."""
    chunks = {id(chunk): chunk for chunk in worker.rows.values()}
    rows = [record for chunk in chunks.values() for record in chunk.records if record.number in worker.rows]
    return sorted(rows, key=lambda record: record.number)
