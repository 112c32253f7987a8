"""Free blocks in the order in which they are handed out. No torch."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

# Places in front that were handed out, before they are dropped.
_DROPPED = 4096


class FreeBlocks:
    """Blocks, first in, first out; any of them may be taken out before.

    One that is taken out keeps its place, which does not count any more. An ordered dictionary needs no such places,
    but each of its steps reads memory here and there, which is in no cache of the CPU.
    """

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        self._places = list(blocks)
        # Those before it were handed out.
        self._first = 0
        # How many of a block's first places do not count.
        self._void: Counter[int] = Counter()
        self._num_void = 0

    def __len__(self) -> int:
        return len(self._places) - self._first - self._num_void

    def __iter__(self) -> Iterator[int]:
        void = self._void.copy()
        for block in self._places[self._first :]:
            if void[block]:
                void[block] -= 1
            else:
                yield block

    def extend(self, blocks: Iterable[int]) -> None:
        """Add blocks behind all others."""
        self._places += blocks

    def pop(self, count: int) -> list[int]:
        """The first ``count``, which are there."""
        stop = self._first + count
        found = self._places[self._first : stop]
        if self._num_void:
            found, stop = self._counting(count)
        self._first = stop
        if stop > max(_DROPPED, len(self._places) // 2):
            self._places, self._first = self._places[stop:], 0
        return found

    def _counting(self, count: int) -> tuple[list[int], int]:
        """The first blocks whose places count, and the place behind them."""
        found: list[int] = []
        void, place = self._void, self._first
        while len(found) < count:
            block = self._places[place]
            place += 1
            # An item that a counter lacks takes a call of Python.
            if void.get(block):
                void[block] -= 1
                self._num_void -= 1
            else:
                found.append(block)
        return found, place

    def remove(self, blocks: Sequence[int]) -> None:
        """Take out blocks, which are there."""
        self._void.update(blocks)
        self._num_void += len(blocks)
        if self._num_void > len(self):
            self._places, self._first = list(self), 0
            self._void.clear()
            self._num_void = 0
