"""The part files of several runs as one: the results of all, in the order of their rows."""

import heapq
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from rosebatch.io.part_file import PartFile


class MergedParts:
    """What an output needs of a part file.

    Args:
        path: for messages.
        parts: with no row in two of them.
    """

    def __init__(self, path: Path, parts: Sequence[PartFile]) -> None:
        self.path = path
        self.manifest: dict[str, Any] = parts[0].manifest
        self._parts = parts

    def __contains__(self, index: int) -> bool:
        return any(index in part for part in self._parts)

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

    def sync(self) -> None:
        """Nothing: the files are complete."""

    def close(self) -> None:
        """Release all files."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.close)

    def remove(self) -> None:
        """Delete all files."""
        with ExitStack() as stack:
            for part in self._parts:
                stack.callback(part.remove)
