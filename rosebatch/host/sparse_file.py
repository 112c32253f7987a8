"""Files with holes: parts that were never written. A reader finds zeros there.

Read as usual, the system makes a page of its cache for each: of a file of 5 GB, that takes ten seconds and more.
"""

import errno
import io
import os
import sys
from pathlib import Path

# Of ``stat``, whatever the blocks of the file system are.
_BLOCK = 512
_ZEROS = bytes(1 << 18)


def open_local(path: Path, buffer_bytes: int) -> io.BufferedReader:
    """Open a file for reading, in binary, with a buffer of so many bytes.

    Raises:
        OSError: it cannot be opened.
    """
    raw = io.FileIO(path)
    status = os.fstat(raw.fileno())
    if status.st_blocks * _BLOCK < status.st_size:
        raw.close()
        raw = _SparseFile(path)
    return io.BufferedReader(raw, buffer_bytes)


class _SparseFile(io.FileIO):
    """Asks where the holes are, and makes their zeros itself."""

    # What was met last.
    _part, _is_hole = range(0), False

    def readinto(self, buffer: "memoryview") -> int | None:  # type: ignore[override]
        place = self.tell()
        if place not in self._part:
            self._part, self._is_hole = self._part_at(place)
            self.seek(place)
        part = memoryview(buffer)[: self._part.stop - place]
        if not self._is_hole:
            return super().readinto(part)
        size = min(len(part), len(_ZEROS))
        part[:size] = _ZEROS[:size]
        self.seek(place + size)
        return size

    def _part_at(self, place: int) -> tuple[range, bool]:
        """Where this part of the file ends, and whether it is a hole."""
        size = os.fstat(self.fileno()).st_size
        if place < size:
            try:
                begin = os.lseek(self.fileno(), place, os.SEEK_DATA)
            except OSError as error:
                if error.errno != errno.ENXIO:
                    # The file system tells of no holes.
                    return range(place, sys.maxsize), False
                # There is no more.
                begin = size
            if begin > place:
                return range(place, begin), True
            return range(place, os.lseek(self.fileno(), place, os.SEEK_HOLE)), False
        return range(place, sys.maxsize), False
