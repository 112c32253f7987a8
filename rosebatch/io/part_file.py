"""Results in the order in which they are finished, in a file that outlives the process.

``rosebatch.io.part_lines`` describes its lines. Lines are only ever appended. A crash tears at most the last one, and
reopening the file drops it. A damaged line in the middle stays and is ignored: its row has no result then.
"""

import os
import time
from array import array
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from rosebatch.core.errors import FailedRunError, FlagError, UserError
from rosebatch.host.sync import sync
from rosebatch.io.failed_write import failed_write
from rosebatch.io.locked_file import open_locked
from rosebatch.io.part_lines import (
    PartLine,
    claimed_index,
    decode_manifest,
    decode_row,
    decode_turn,
    encode_manifest,
    encode_turn,
    is_torn_manifest,
    manifest_checksum,
)

# The most that a power cut can lose, if the disk is fast enough for the rows. The end of the process loses no row that
# the system already has.
_SYNC_ROWS = 1024
# The time that such rows may take at least, in times of what the disk took for the last ones.
_SYNC_SHARE = 10
# Bytes of rows that wait to be handed to the system, at most.
_MAX_UNWRITTEN = 4 << 20
# The most that a power cut can lose in any case.
_SYNC_SECONDS = 2.0
# Of a file that is read from its beginning to its end.
_READ_BYTES = 1 << 20
# Lines that are not read a second time.
_KEPT_BYTES = 1 << 22
# Rows whose places in the file are in memory at once, 24 bytes each: about as many as a job sorts together.
_WINDOW = 2**20


class PartFile:
    """The results so far. Only one process at a time may hold the file.

    Attributes:
        path: of the file.
        num_rows: results in it.
        num_failed: error rows among them.
        num_damaged: lines that were damaged when the file was reopened. They count as missing.
        mixed: whether its rows are of several runs, see ``go_on``.
    """

    def __init__(self, path: Path, descriptor: int, describe: Callable[[], dict[str, Any]]) -> None:
        self.path = path
        self.num_rows = 0
        self.num_failed = 0
        self.num_damaged = 0
        self.mixed = False
        self._descriptor = descriptor
        self._describe = describe
        self._checksum: int | None = None
        self._size = 0
        self._lines: list[bytes] = []
        self._unwritten = 0
        # For each window of indices with a row: one bit an index.
        self._present: dict[int, bytearray] = {}
        self._synced = time.monotonic()
        self._unsynced = 0
        # What the last one took.
        self._sync_seconds = 0.0

    @cached_property
    def manifest(self) -> dict[str, Any]:
        """The manifest of the run that began the file, or of the last one that went on with another."""
        return self._describe()

    @classmethod
    def create(cls, path: Path, manifest: Callable[[], dict[str, Any]]) -> "PartFile":
        """Begin a file. It is empty until the first row.

        Args:
            path: of the file. Only an empty file there, or one without results, is replaced.
            manifest: makes the manifest, before the first row at the latest.

        Raises:
            FlagError: the file already holds results.
            UserError: it cannot be created, another process holds it, or it is none of ours.
        """
        descriptor = open_locked(path, os.O_CREAT)
        assert descriptor is not None
        part = cls(path, descriptor, manifest)
        with part._opening(), os.fdopen(descriptor, "rb", closefd=False) as file:
            first = _first_line(file, path)
            if first is not None:
                decode_manifest(first, path)
                if os.fstat(descriptor).st_size > len(first):
                    raise FlagError(f"{path} holds results of an earlier run: rerun with --resume, or delete the file")
            part._cut(0)
            sync(path.parent)
        return part

    @classmethod
    def reopen(cls, path: Path) -> "PartFile | None":
        """Open an earlier run's file and drop a torn last line.

        Returns:
            None if there is no file, or not even a whole manifest in it.

        Raises:
            UserError: it cannot be read, another process holds it, or it is none of ours.
        """
        descriptor = open_locked(path)
        if descriptor is None:
            return None
        part = cls(path, descriptor, dict)
        with part._opening(), os.fdopen(descriptor, "rb", closefd=False) as file:
            first = _first_line(file, path)
            if first is None:
                part.close()
                return None
            part.manifest = decode_manifest(first, path)
            part._checksum = manifest_checksum(first)
            part._recover(file)
        return part

    def go_on(self, manifest: dict[str, Any]) -> None:
        """Go on as another run: the rows so far stay. A later run is compared with this manifest."""
        assert self._checksum is not None, "an earlier run has begun the file"
        self._lines.append(encode_turn(manifest, self._checksum))
        self.sync()
        self.manifest, self.mixed = manifest, True

    def leave_out(self, limit: int) -> None:
        """Ignore the results of rows from this index on."""
        os.lseek(self._descriptor, 0, os.SEEK_SET)
        with self._opening(), os.fdopen(self._descriptor, "rb", closefd=False) as file:
            file.readline()
            self._recover(file, limit)

    def __contains__(self, index: int) -> bool:
        window, place = divmod(index, _WINDOW)
        bits = self._present.get(window)
        return bits is not None and bool(bits[place // 8] >> place % 8 & 1)

    def begin(self) -> int:
        """Write the manifest, so that the file is one of this run also without a row; returns its checksum."""
        if self._checksum is None:
            first = encode_manifest(self.manifest)
            self._checksum = manifest_checksum(first)
            self._lines.append(first)
        return self._checksum

    def append_lines(self, indices: Sequence[int], lines: Sequence[bytes], failed: Collection[int]) -> None:
        """Add results. They reach the disk within a second or two.

        Args:
            indices: of the rows.
            lines: of each row, by a ``PartEncoder`` with the checksum of ``begin``.
            failed: indices of the error rows.

        Raises:
            FailedRunError: the disk is full or fails. Earlier results stay.
        """
        self.begin()
        self._lines += lines
        self._unwritten += sum(map(len, lines))
        self._count(indices)
        self.num_failed += len(failed)
        self._unsynced += len(lines)
        since = time.monotonic() - self._synced
        due = self._unsynced >= _SYNC_ROWS and since >= _SYNC_SHARE * self._sync_seconds
        if due or since >= _SYNC_SECONDS:
            self.sync()
        elif self._unwritten >= _MAX_UNWRITTEN:
            self.flush()

    def flush(self) -> None:
        """Hand all rows to the system: the end of this process then loses none."""
        if self._lines:
            lines, self._lines, self._unwritten = self._lines, [], 0
            self._write(b"".join(lines))

    def sync(self) -> None:
        """Wait until all rows are on the disk."""
        self.flush()
        began = time.monotonic()
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._failure(error) from None
        self._synced, self._unsynced = time.monotonic(), 0
        self._sync_seconds = self._synced - began

    def rows(self, *, failed: bool | None = None) -> Iterator[bytes]:
        """The rows as JSON, in the order of their indices; see ``numbered_rows``."""
        return (row for _, row in self.numbered_rows(failed=failed))

    def numbered_rows(self, *, failed: bool | None = None) -> Iterator[tuple[int, bytes]]:
        """The index of each row, and its JSON, in order.

        One window of indices is read at a time. A window's lines are close together, so the file is read little more
        than once, or twice where rows were sorted.

        Args:
            failed: True for the error rows alone, False for all others, None for both.

        Raises:
            UserError: a line was damaged since it was written, or another file took the place of this one.
        """
        self.flush()
        with self.path.open("rb", buffering=_READ_BYTES) as file:
            descriptor = file.fileno()
            if not self._is_ours(os.fstat(descriptor)):
                raise UserError(f"{self.path}: another file took its place while the run wrote to it")
            place = len(file.readline())
            for window in sorted(self._present):
                rows, places, sizes, kept, place = self._places(file, place, window)
                for at in map(int, np.argsort(rows)):
                    line = self._decode(kept.pop(at, b"") or os.pread(descriptor, sizes[at], places[at]))
                    if line is None:
                        raise self._damage()
                    if failed is None or failed == line.failed:
                        yield line.row_index, line.row

    def _places(
        self, file: BinaryIO, place: int, window: int
    ) -> tuple["array[int]", "array[int]", "array[int]", dict[int, bytes], int]:
        """The lines of a window: their rows, where they begin, their bytes, and the first of them themselves.

        The last value is where to begin searching for later windows.
        """
        rows, places, sizes = array("Q"), array("Q"), array("Q")
        kept, room = dict[int, bytes](), _KEPT_BYTES
        left = bytearray(self._present[window])
        missing = int.from_bytes(left).bit_count()
        later = 0
        file.seek(place)
        while missing:
            content = file.readline()
            if not content:
                raise self._damage()
            index = self._index_of(content)
            if index is not None:
                its_window, at = divmod(index, _WINDOW)
                if its_window > window:
                    later = later or place
                elif its_window == window and left[at >> 3] & (bit := 1 << (at & 7)):
                    # Once: a line may be there twice.
                    left[at >> 3] ^= bit
                    if len(content) <= room:
                        kept[len(rows)] = content
                        room -= len(content)
                    rows.append(at)
                    places.append(place)
                    sizes.append(len(content))
                    missing -= 1
            place += len(content)
        return rows, places, sizes, kept, later or place

    def close(self) -> None:
        """Release the file. Its rows stay for a later run."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def remove(self) -> None:
        """Delete the file, unless it was released before or another file took its place.

        Raises:
            FailedRunError: it cannot be deleted.
        """
        if self._descriptor < 0:
            return
        try:
            if self._is_ours(self.path.stat()):
                self.path.unlink()
        except FileNotFoundError:
            pass
        except OSError as error:
            raise failed_write(self.path, error, "; it is no longer needed, delete it") from None
        finally:
            self.close()

    def _recover(self, file: BinaryIO, limit: int | None = None) -> None:
        """Count the rows behind the first line, up to index ``limit``. Cut off what follows the last intact one."""
        assert self._checksum is not None, "the first line was read"
        self.num_rows = self.num_failed = self.num_damaged = 0
        self._present.clear()
        end = place = file.tell()
        for content in file:
            place += len(content)
            if line := self._decode(content):
                end = place
                # A line that is there twice counts once.
                if line.row_index not in self and (limit is None or line.row_index < limit):
                    self._count([line.row_index])
                    self.num_failed += line.failed
            elif (manifest := decode_turn(content, self._checksum)) is not None:
                end, self.manifest, self.mixed = place, manifest, True
            elif content.endswith(b"\n"):
                self.num_damaged += 1
        self._cut(end)

    def _index_of(self, line: bytes) -> int | None:
        """The index of a line; None for one that was damaged when the file was reopened.

        Without such lines, the checksum can wait until the row is read.
        """
        if not self.num_damaged:
            return claimed_index(line)
        found = self._decode(line)
        return None if found is None else found.row_index

    def _decode(self, line: bytes) -> PartLine | None:
        assert self._checksum is not None, "a file with rows has a manifest"
        return decode_row(line, self._checksum)

    def _count(self, indices: Sequence[int]) -> None:
        for index in indices:
            window, place = divmod(index, _WINDOW)
            bits = self._present.get(window)
            if bits is None:
                bits = self._present[window] = bytearray(_WINDOW // 8)
            mask = 1 << (place & 7)
            assert not bits[place >> 3] & mask, "a row has one result"
            bits[place >> 3] |= mask
        self.num_rows += len(indices)

    def _write(self, data: bytes) -> None:
        left = memoryview(data)
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError as error:
            # Where this fails too, a torn line stays, which later readers ignore.
            with suppress(OSError):
                self._cut(self._size)
            raise self._failure(error) from None
        self._size += len(data)

    def _cut(self, size: int) -> None:
        os.ftruncate(self._descriptor, size)
        os.lseek(self._descriptor, size, os.SEEK_SET)
        self._size = size

    def _is_ours(self, status: os.stat_result) -> bool:
        """Whether this is the status of the open file."""
        return os.path.samestat(status, os.fstat(self._descriptor))

    @contextmanager
    def _opening(self) -> Iterator[None]:
        """Release the file if it cannot be used."""
        try:
            yield
        except OSError as error:
            self.close()
            raise UserError(f"{self.path}: {error.strerror}") from None
        except BaseException:
            self.close()
            raise

    def _failure(self, error: OSError) -> FailedRunError:
        return failed_write(self.path, error, "; earlier rows are saved; rerun with --resume to continue")

    def _damage(self) -> UserError:
        return UserError(f"{self.path}: lines were damaged during the run; rerun with --resume to compute them again")


def _first_line(file: BinaryIO, path: Path) -> bytes | None:
    """The first line; None if the file is empty or a crash left only part of a manifest."""
    line = file.readline()
    if line.endswith(b"\n"):
        return line
    if not is_torn_manifest(line):
        raise UserError(f"{path}: is not a part file of rosebatch; delete it or choose another output")
    return None
