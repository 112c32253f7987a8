"""Results in the order in which they are finished, in a file that outlives the process.

The first line is the run's manifest (``rosebatch.job.manifest``). Every other line is ``[index,failed,row]`` in JSON,
so that rows can be counted and copied without decoding them. Lines are only ever appended: a crash can tear only the
last one, and reopening the file drops it.
"""

import fcntl
import os
import re
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from rosebatch.errors import FlagError, UserError

# The most that a power cut can lose. The end of the process loses no row that the system already has.
_SYNC_ROWS = 1024
_SYNC_SECONDS = 2.0
# Rows whose places in the file are in memory at once.
_WINDOW = 2**16
_HEAD = re.compile(rb"\[(\d+),([01]),")


class PartFile:
    """The results so far. Only one process at a time may hold the file.

    Attributes:
        path: of the file.
        manifest: of the run that began the file.
        num_rows: results in it.
        num_failed: error rows among them.
    """

    def __init__(self, path: Path, descriptor: int, manifest: dict[str, Any]) -> None:
        self.path = path
        self.manifest = manifest
        self.num_rows = 0
        self.num_failed = 0
        self._descriptor = descriptor
        self._size = 0
        self._lines: list[bytes] = []
        self._present = bytearray()
        self._synced = time.monotonic()
        self._unsynced = 0

    @classmethod
    def create(cls, path: Path, manifest: dict[str, Any]) -> "PartFile":
        """Begin a file.

        Raises:
            FlagError: the file already holds results.
            UserError: it cannot be created, or another process holds it.
        """
        part = cls(path, _open(path), manifest)
        try:
            first = _first_line(path)
            if first is not None and path.stat().st_size > len(first):
                raise FlagError(f"{path} holds results of an earlier run: rerun with --resume, or delete the file")
            part._cut(0)
            part._write(msgspec.json.encode(manifest) + b"\n")
        except BaseException:
            part.close()
            raise
        return part

    @classmethod
    def reopen(cls, path: Path) -> "PartFile | None":
        """Open an earlier run's file and drop a torn last line.

        Returns:
            None if there is no file, or not even a whole manifest in it.

        Raises:
            UserError: it cannot be read, or another process holds it.
        """
        if not path.exists():
            return None
        part = cls(path, _open(path), {})
        try:
            first = _first_line(path)
            if first is None:
                part.close()
                return None
            part.manifest = _decode_manifest(first, path)
            part._recover(len(first))
        except BaseException:
            part.close()
            raise
        return part

    def __contains__(self, index: int) -> bool:
        byte, bit = divmod(index, 8)
        return byte < len(self._present) and bool(self._present[byte] >> bit & 1)

    def append(self, index: int, row: dict[str, Any], *, failed: bool) -> None:
        """Add a result. It reaches the disk within a second or two.

        Raises:
            UserError: the disk is full or fails. Earlier results stay.
        """
        assert index not in self, "a row has one result"
        self._lines.append(b"[%d,%d,%s]\n" % (index, failed, msgspec.json.encode(row, enc_hook=str)))
        self._count(index, failed)
        self._unsynced += 1
        if self._unsynced >= _SYNC_ROWS or time.monotonic() - self._synced >= _SYNC_SECONDS:
            self.sync()

    def flush(self) -> None:
        """Hand all rows to the system: the end of this process then loses none."""
        if self._lines:
            lines, self._lines = self._lines, []
            self._write(b"".join(lines))

    def sync(self) -> None:
        """Wait until all rows are on the disk."""
        self.flush()
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._failure(error) from None
        self._synced, self._unsynced = time.monotonic(), 0

    def rows(self, *, failed: bool | None = None) -> Iterator[bytes]:
        """The rows as JSON, in the order of their indices.

        One window of indices is read at a time. Rows finish nearly in order, so a window's lines are close together,
        and the file is read little more than once.

        Args:
            failed: True for the error rows alone, False for all others, None for both.
        """
        self.flush()
        with self.path.open("rb") as file:
            place = len(file.readline())
            for first in range(0, 8 * len(self._present), _WINDOW):
                places, place = self._places(file, place, first)
                for line_place in filter(None, places):
                    file.seek(line_place)
                    line = file.readline()
                    head = _head(line)
                    if failed is None or failed == (head[2] == b"1"):
                        yield line[head.end() : -2]

    def _places(self, file: BinaryIO, place: int, first: int) -> tuple["array[int]", int]:
        """Where the lines of a window begin (0 for missing rows), and where to begin searching for later windows."""
        places = array("Q", bytes(8 * _WINDOW))
        missing = int.from_bytes(self._present[first // 8 : (first + _WINDOW) // 8]).bit_count()
        later = 0
        file.seek(place)
        while missing:
            line = file.readline()
            index = int(_head(line)[1])
            if index >= first + _WINDOW:
                later = later or place
            elif index >= first:
                places[index - first] = place
                missing -= 1
            place += len(line)
        return places, later or place

    def close(self) -> None:
        """Release the file. Its rows stay for a later run."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        """Delete the file, unless it was released before."""
        if self._descriptor >= 0:
            self.path.unlink(missing_ok=True)
            self.close()

    def _recover(self, start: int) -> None:
        """Count the rows from byte ``start`` on, and cut off a torn last line."""
        place = start
        with self.path.open("rb") as file:
            file.seek(start)
            for line in file:
                head = _HEAD.match(line)
                if head is None or not line.endswith(b"]\n"):
                    break
                self._count(int(head[1]), head[2] == b"1")
                place += len(line)
            rest = file.readline()
        if rest:
            raise UserError(f"{self.path}: damaged at byte {place}, before its end; delete the file to start again")
        self._cut(place)

    def _count(self, index: int, failed: bool) -> None:
        byte, bit = divmod(index, 8)
        if byte >= len(self._present):
            self._present.extend(bytes(byte + 1 - len(self._present)))
        self._present[byte] |= 1 << bit
        self.num_rows += 1
        self.num_failed += failed

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            self._cut(self._size)
            raise self._failure(error) from None
        self._size += len(data)

    def _cut(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)
        os.lseek(self._descriptor, size, os.SEEK_SET)
        self._size = size

    def _failure(self, error: OSError) -> UserError:
        return UserError(f"{self.path}: {error.strerror}; earlier rows are saved; rerun with --resume to continue")


def _open(path: Path) -> int:
    """A descriptor with a lock, so that no other process holds the file."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"{path}: another run is writing to it; wait for it or choose another output") from None
    except OSError:
        # The file system has no locks.
        pass
    return descriptor


def _decode_manifest(first: bytes, path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(first, type=dict[str, Any])
    except msgspec.DecodeError:
        raise UserError(f"{path}: is not a part file of rosebatch; delete it or choose another output") from None


def _head(line: bytes) -> re.Match[bytes]:
    match = _HEAD.match(line)
    assert match, "every line was written or checked by this class"
    return match


def _first_line(path: Path) -> bytes | None:
    """The first line; None if it is torn or missing."""
    with path.open("rb") as file:
        line = file.readline()
    return line if line.endswith(b"\n") else None
