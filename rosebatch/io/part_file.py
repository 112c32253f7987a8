"""Results in the order in which they come, in a file that outlives the process.

The first line is the run's manifest (``rosebatch.job.manifest``), every other one ``[index,failed,row]`` in JSON: what
the file holds can be told, and a row copied, without decoding any. Lines are only ever appended, so a crash can tear
none but the last, which is dropped when the file is opened again.
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

# What a power cut can cost at most, in rows and in seconds. Rows that were handed to the system survive the process.
_SYNC_ROWS = 1024
_SYNC_SECONDS = 2.0
# Rows whose places are known at a time.
_WINDOW = 2**16
_HEAD = re.compile(rb"\[(\d+),([01]),")


class PartFile:
    """The results so far; held by one process at a time.

    Attributes:
        path: of the file.
        manifest: of the run that began it.
        num_rows: results in it.
        num_failed: of these, error rows.
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
            FlagError: there is one with results already.
            UserError: it cannot be created, or another process holds it.
        """
        part = cls(path, _open(path), manifest)
        try:
            first = _first_line(path)
            if first is not None and path.stat().st_size > len(first):
                raise FlagError(f"{path} holds results of an earlier run: go on with --resume, or remove it")
            part._cut(0)
            part._write(msgspec.json.encode(manifest) + b"\n")
        except BaseException:
            part.close()
            raise
        return part

    @classmethod
    def reopen(cls, path: Path) -> "PartFile | None":
        """Go on with a file, without a line that was torn; None where there is nothing to go on with.

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
            part.manifest = _decode(first, path)
            part._recover(len(first))
        except BaseException:
            part.close()
            raise
        return part

    def __contains__(self, index: int) -> bool:
        byte, bit = divmod(index, 8)
        return byte < len(self._present) and bool(self._present[byte] >> bit & 1)

    def append(self, index: int, row: dict[str, Any], *, failed: bool) -> None:
        """Add a result, on its way to the disk within a second or two.

        Raises:
            UserError: the disk is full, or failed; what was added before stays.
        """
        assert index not in self, "a row has one result"
        self._lines.append(b"[%d,%d,%s]\n" % (index, failed, msgspec.json.encode(row, enc_hook=str)))
        self._count(index, failed)
        self._unsynced += 1
        if self._unsynced >= _SYNC_ROWS or time.monotonic() - self._synced >= _SYNC_SECONDS:
            self.sync()

    def flush(self) -> None:
        """Hand all rows to the system: from here on the end of this process costs none of them."""
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
        """All rows as JSON, or the error rows alone, or all others, in the order of their indices.

        A window of indices at a time. Rows are finished nearly in order, so a window's lines stand close together, and
        the file is read little more than once.
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
        """Where the lines of a window stand, 0 for rows that are not there; and where to look for later windows'."""
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
        """Let go of the file; its rows are for a later run."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        """Delete the file, if it was not let go of."""
        if self._descriptor >= 0:
            self.path.unlink(missing_ok=True)
            self.close()

    def _recover(self, start: int) -> None:
        """Count the rows from byte ``start`` on, and cut a torn line off."""
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
            raise UserError(f"{self.path}: damaged at byte {place}, and not at its end; remove it to start anew")
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
        return UserError(f"{self.path}: {error.strerror}; what it holds is safe, --resume goes on with it")


def _open(path: Path) -> int:
    """A descriptor that no other process has."""
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise UserError(f"{path}: another run is writing to it") from None
    except OSError:
        # A file system that knows no locks.
        pass
    return descriptor


def _decode(first: bytes, path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(first, type=dict[str, Any])
    except msgspec.DecodeError:
        raise UserError(f"{path}: is no file of results; remove it or choose another output") from None


def _head(line: bytes) -> re.Match[bytes]:
    match = _HEAD.match(line)
    assert match, "written or checked by this class"
    return match


def _first_line(path: Path) -> bytes | None:
    """None where it is torn or missing."""
    with path.open("rb") as file:
        line = file.readline()
    return line if line.endswith(b"\n") else None
