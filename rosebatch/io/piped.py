"""Inputs that can be read only once, such as pipes. They are copied to a temporary file, which may be read again."""

import io
import os
import shutil
import tempfile
import weakref
from typing import IO

from rosebatch.core.errors import UserError
from rosebatch.host.paths import open_stream


class Copied:
    """The contents of a pipe or device. The file has no name: whatever ends the process frees its place on the disk.

    Args:
        path: of the pipe. It is read to its end here.

    Raises:
        UserError: it cannot be read, or the temporary folder has no room.
    """

    def __init__(self, path: str) -> None:
        try:
            source = open_stream(path, "rb")
        except OSError as error:
            raise UserError(f"{path}: {error.strerror}") from None
        with source:
            self._copy(source, path)

    @classmethod
    def of(cls, source: IO[bytes], name: str, head: bytes) -> "Copied":
        """The contents of an open stream, after what was read of it before.

        Args:
            source: read to its end here.
            name: for messages.
            head: goes first.
        """
        copied = cls.__new__(cls)
        copied._copy(source, name, head)
        return copied

    def _copy(self, source: IO[bytes], name: str, head: bytes = b"") -> None:
        try:
            self._file = tempfile.TemporaryFile()  # noqa: SIM115
            weakref.finalize(self, self._file.close)
            self._file.write(head)
            shutil.copyfileobj(source, self._file, 2**20)
            self._file.flush()
        except OSError as error:
            raise UserError(f"{name}: cannot be copied to a temporary file ({error.strerror}); {room()}") from None

    def open(self) -> IO[bytes]:
        """The contents from the start. Several readers do not disturb each other."""
        return io.BufferedReader(_At(self._file.fileno()), 2**16)


class _At(io.RawIOBase):
    """Reads a descriptor at a place of its own. Closing it leaves the descriptor open."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = (0, self._place, os.fstat(self._descriptor).st_size)[whence]
        self._place = start + offset
        return self._place

    def readinto(self, buffer: "memoryview") -> int:  # type: ignore[override]
        size = os.preadv(self._descriptor, [buffer], self._place)
        self._place += size
        return size


def room() -> str:
    """How to give temporary files more room, for the end of a message."""
    return f"set TMPDIR to a folder with more room than {os.environ.get('TMPDIR') or '/tmp'}"
