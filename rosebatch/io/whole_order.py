"""The order of a whole input: rows that begin alike follow each other, however far apart they are in it.

A shared beginning is then computed once and is still in the KV cache for the next row. A window keeps digests of each
row's beginning, at growing depths. Rows that can be read again wait without their contents.

Sources: Zheng et al. 2024, BatchLLM (arXiv 2412.03594), which groups the prompts of a batch by their prefixes; Liu et
al. 2024, Optimizing LLM Queries in Relational Workloads (arXiv 2403.05821).
"""

import pickle
from array import array
from collections.abc import Callable, Iterator
from itertools import accumulate, pairwise, repeat
from operator import attrgetter
from typing import Any
from zlib import crc32

import numpy as np
from msgspec.structs import replace

from rosebatch.io.parse import Content, Record
from rosebatch.io.read_ahead import grouped

# Bytes of a beginning: at first about a KV block of 16 tokens, and at last a prompt of some 20,000 tokens.
_DEPTHS = tuple(accumulate(repeat(64, 23), lambda depth, step: depth + max(step, depth // 3)))
# Bytes of a prompt that are compared at most.
COMPARED = _DEPTHS[-1]
# What is put in front of a prompt is so long, or a multiple: rows that have it in common follow each other.
FRONT = _DEPTHS[0]
_SPANS = ((0, _DEPTHS[0]), *pairwise(_DEPTHS))
# Of a row's objects and digests.
_ROW_BYTES = 400
# Rows and bytes of the first window, for which the first answers wait.
_FIRST_ROWS, _FIRST_BYTES = 1 << 17, 1 << 27
# Groups that are read for each one handed out.
_GROUPS_READ = 8
# Of any window. When the part file is written in the order of the input, so many rows are looked for at once.
_MAX_ROWS = 1 << 20

# Rows of so many bytes are held as they are: packed and unpacked, they would be there twice.
_LARGE = 1 << 20

Digests = np.ndarray[Any, np.dtype[np.uint32]]
Ends = np.ndarray[Any, np.dtype[np.uint64]]
Groups = Iterator[list[Record]]
Read = Callable[[list[Record]], list[Record]]


def in_whole_order(groups: Groups, beginning: Callable[[Content], bytes], read: Read, max_bytes: int) -> Groups:
    """Reorder rows, a window at a time: each that begins like earlier ones comes behind these, others in their order.

    The next window is read while one is handed out, and grows.

    Args:
        groups: of rows.
        beginning: what a prompt begins with, as bytes to compare.
        read: gives the rows of a group that have a ``place`` their contents.
        max_bytes: of the rows that are held. Where a row is larger than others, it is alone.
    """
    window = _Window(beginning, read)
    while not window.is_first(max_bytes) and (group := next(groups, None)):
        window.add(group)
    while len(window):
        following = _Window(beginning, read)
        for group in window.in_order():
            yield group
            for _ in range(_GROUPS_READ):
                held = window.size + following.size
                fits = not held or held + max(window.last, following.last) < max_bytes
                if fits and len(following) < _MAX_ROWS:
                    following.add(next(groups, []))
        window = following


class _Window:
    """Rows that are sorted together; ``size`` is about their bytes in memory, ``last`` those of the last group.

    The next group is expected to be as large as the last one.
    """

    def __init__(self, beginning: Callable[[Content], bytes], read: Read) -> None:
        self.size = self.last = 0
        self._bytes_read = 0
        self._beginning = beginning
        self._read = read
        # Each without its content, which is packed: token ids take a tenth then. None is read again, or is in the row.
        self._rows: list[tuple[Record, bytes | None] | None] = []
        # Of all rows, one behind the other; and where those of each row end.
        self._digests, self._ends = array("I"), array("Q", [0])

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, group: list[Record]) -> None:
        before = self.size
        for row in group:
            self._digests.extend(_digests(self._beginning(row.content)))
            self._ends.append(len(self._digests))
            packed = None
            if row.place is None and row.size < _LARGE:
                packed = pickle.dumps(row.content, pickle.HIGHEST_PROTOCOL)
            held = row if row.place is None and packed is None else replace(row, content=b"")
            self._rows.append((held, packed))
            self.size += _held_bytes(held, packed)
            self._bytes_read += row.size
        self.last = self.size - before
        # Whoever read them has them no more.
        group.clear()

    def is_first(self, max_bytes: int) -> bool:
        """Whether these are enough for the first answers."""
        return self.size + self.last >= max_bytes or self._bytes_read >= _FIRST_BYTES or len(self) >= _FIRST_ROWS

    def in_order(self, limit: int = 256) -> Groups:
        """The rows in groups of at most so many, and of not too many bytes. They are let go."""
        order = _order(np.array(self._digests), np.array(self._ends)).tolist()
        self._digests = array("I")
        return map(self._read, grouped(map(self._take, order), attrgetter("size"), limit))

    def _take(self, place: int) -> Record:
        held, self._rows[place] = self._rows[place], None
        assert held is not None, "each row is taken once"
        row, packed = held
        self.size -= _held_bytes(row, packed)
        return row if packed is None else replace(row, content=pickle.loads(packed))


def _held_bytes(row: Record, packed: bytes | None) -> int:
    return _ROW_BYTES + (len(packed) if packed is not None else row.size if row.content else 0)


def _digests(text: bytes) -> list[int]:
    """Of the first bytes, at each depth up to the first one where they end."""
    found, digest, size = [], 0, len(text)
    for start, depth in _SPANS:
        digest = crc32(text[start:depth], digest)
        found.append(digest)
        if depth >= size:
            break
    return found


def _order(digests: Digests, ends: Ends) -> "np.ndarray[Any, np.dtype[np.intp]]":
    """The order of rows by their digests.

    At each depth a row follows the first one with its digest. So it is sorted by these first rows, at the smallest
    depth before others.
    """
    starts, depths = ends[:-1].astype(np.intp), np.diff(ends)
    rows = np.arange(len(starts))
    leading, keys = np.zeros(len(rows), np.int32), []
    # Rows that begin like another one, so far.
    shared = rows
    for depth in range(len(_DEPTHS)):
        shared = shared[depths[shared] > depth]
        found = digests[starts[shared] + depth]
        _, first, group, count = np.unique(found, return_index=True, return_inverse=True, return_counts=True)
        if len(first) > np.count_nonzero(leading[shared] == shared):
            # Some rows that were alike up to here are not any more.
            leading = rows.astype(np.int32)
            leading[shared] = shared[first][group]
            keys.append(leading)
        shared = shared[count[group] > 1]
    return np.lexsort(keys[::-1]) if keys else rows
