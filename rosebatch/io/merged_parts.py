"""The part files of several runs as one: the results of all, in the order of their rows."""

import heapq
from collections.abc import Iterator, Sequence

from rosebatch.io.part_file import PartFile


class MergedParts:
    """See ``rosebatch.io.placement.Results``.

    Args:
        parts: with no row in two of them.
    """

    def __init__(self, parts: Sequence[PartFile]) -> None:
        self._parts = parts

    @property
    def num_rows(self) -> int:
        """Results of all."""
        return sum(part.num_rows for part in self._parts)

    @property
    def num_failed(self) -> int:
        """Error rows among them."""
        return sum(part.num_failed for part in self._parts)

    def rows(self, *, failed: bool | None = None) -> Iterator[bytes]:
        """See ``PartFile.rows``."""
        sorted_rows = heapq.merge(*(part.numbered_rows(failed=failed) for part in self._parts))
        return (row for _, row in sorted_rows)
