"""Neighbouring rows that travel together."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from rosebatch.io.parse import Record

# Of a chunk. Neighbours often begin alike, so one worker should have them.
MAX_ROWS = 64

_columns = attrgetter(*Record.__struct_fields__)


@dataclass(frozen=True, slots=True, eq=False)
class Chunk:
    """Rows, as they were read or packed: between reading and serving, nobody looks inside of a packed one.

    Attributes:
        numbers: of the rows.
        size: bytes of their contents.
    """

    numbers: Sequence[int]
    size: int
    _records: Sequence[Record] | None
    _packed: bytes | None

    @classmethod
    def of(cls, records: Sequence[Record]) -> "Chunk":
        """The chunk with these rows, at least one."""
        return cls([record.number for record in records], sum([record.size for record in records]), records, None)

    def pack(self) -> "Chunk":
        """The same rows, packed."""
        return Chunk(self.numbers, self.size, None, self.packed)

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def packed(self) -> bytes:
        """The rows, pickled column by column: to pickle each as an object takes five times as long."""
        if self._packed is not None:
            return self._packed
        return pickle.dumps(list(zip(*map(_columns, self.records), strict=True)), pickle.HIGHEST_PROTOCOL)

    @property
    def records(self) -> Sequence[Record]:
        """The rows."""
        return unpack(self._packed) if self._packed is not None else self._records or ()

    @property
    def mean_size(self) -> int:
        """Bytes of a row."""
        return self.size // len(self.numbers)

    def rows_within(self, rows: int, size: int) -> int:
        """How many of the first rows are at most so many, and have at most so many bytes."""
        if len(self) <= rows and self.size <= size:
            return len(self)
        if rows <= 0 or size <= 0:
            return 0
        fitting = 0
        for record in self.records[:rows]:
            size -= record.size
            if size < 0:
                break
            fitting += 1
        return fitting

    def split(self, rows: int) -> tuple["Chunk", "Chunk"]:
        """The first rows, and the others: both have some."""
        records = self.records
        return Chunk.of(records[:rows]), Chunk.of(records[rows:])

    def without(self, done: Callable[[int], bool]) -> "Chunk | None":
        """The rows that are not done, by their numbers; None if there are none."""
        left = [number for number in self.numbers if not done(number)]
        if len(left) == len(self):
            return self
        wanted = set(left)
        return Chunk.of([record for record in self.records if record.number in wanted]) if left else None


def unpack(packed: bytes) -> list[Record]:
    """The rows of a chunk."""
    return list(map(Record, *pickle.loads(packed)))


def in_chunks(records: Sequence[Record], limit: int = MAX_ROWS) -> Iterator[Chunk]:
    """Neighbours in chunks of at most so many."""
    for start in range(0, len(records), limit):
        yield Chunk.of(records[start : start + limit])
