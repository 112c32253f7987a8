"""Free blocks in the order in which they are handed out. No torch."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence


class FreeBlocks:
    """Blocks, first in, first out; any of them may be taken out before.

    One that is taken out keeps its place, which does not count any more. An ordered dictionary needs no such places,
    but each of its steps reads memory here and there, which is in no cache of the CPU.
    """

    def __init__(self, blocks: Iterable[int] = ()) -> None:
        self._places = deque(blocks)
        # How many of a block's first places do not count.
        self._void: Counter[int] = Counter()
        self._num_void = 0

    def __len__(self) -> int:
        return len(self._places) - self._num_void

    def __iter__(self) -> Iterator[int]:
        void = self._void.copy()
        for block in self._places:
            if void[block]:
                void[block] -= 1
            else:
                yield block

    def extend(self, blocks: Iterable[int]) -> None:
        """Add blocks behind all others."""
        self._places.extend(blocks)

    def pop(self, count: int) -> list[int]:
        """The first ``count``, which are there."""
        first, void = self._places.popleft, self._void
        if not self._num_void:
            return [first() for _ in range(count)]
        found: list[int] = []
        while len(found) < count:
            block = first()
            if void[block]:
                void[block] -= 1
                self._num_void -= 1
            else:
                found.append(block)
        return found

    def remove(self, blocks: Sequence[int]) -> None:
        """Take out blocks, which are there."""
        self._void.update(blocks)
        self._num_void += len(blocks)
        if self._num_void > len(self):
            self._places = deque(self)
            self._void.clear()
            self._num_void = 0
