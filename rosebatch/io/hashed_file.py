"""Files that were hashed: what is read of them afterwards has the same contents, or the job ends.

Every write changes the times of a file. So these are looked at behind each read, and where they differ, the file is
hashed again.
"""

import hashlib
import io
import os

from rosebatch.core.errors import ChangedInputError, UserError
from rosebatch.host.file_state import FileState

_READ_BYTES = 1 << 20


class HashedFile:
    """What was hashed of a local file.

    Args:
        path: of the file.
        state: of the file before it was hashed.
        digest: SHA-256 of its contents.
    """

    def __init__(self, path: str, state: FileState, digest: str) -> None:
        self._path = path
        self._digest = digest
        # Of the path, and of what was open when another file took its place.
        self._states = {state}

    def open(self, raw: io.RawIOBase, buffer_bytes: int) -> io.BufferedReader:
        """A reader of an open file. It raises ChangedInputError where ``is_same`` does, and closes the file."""
        return io.BufferedReader(_Verified(raw, self), buffer_bytes)

    def is_same(self, descriptor: int) -> bool:
        """Whether all that was read of an open file so far has the contents that were hashed.

        Where it is False, they have changed and changed back: what was read last has to be read again.

        Raises:
            ChangedInputError: the file has other contents now.
            UserError: it cannot be read.
        """
        try:
            state = FileState.of(descriptor)
            if state in self._states:
                return True
            found = _digest(descriptor)
        except OSError as error:
            raise UserError(f"{self._path}: {error.strerror or error}") from None
        if found != self._digest:
            raise ChangedInputError(self._path)
        self._states.add(state)
        return False


def _digest(descriptor: int) -> str:
    """SHA-256 of an open file, whose place stays."""
    found, place = hashlib.sha256(), 0
    while block := os.pread(descriptor, _READ_BYTES, place):
        found.update(block)
        place += len(block)
    return found.hexdigest()


class _Verified(io.RawIOBase):
    def __init__(self, raw: io.RawIOBase, hashed: HashedFile) -> None:
        self._raw = raw
        self._hashed = hashed

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._raw.fileno()

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        return self._raw.seek(offset, whence)

    def readinto(self, buffer: "memoryview") -> int | None:  # type: ignore[override]
        place = self._raw.tell()
        size = self._raw.readinto(buffer)
        while not self._hashed.is_same(self._raw.fileno()):
            self._raw.seek(place)
            size = self._raw.readinto(buffer)
        return size

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()
