"""Compressed files as streams. All members of a file are read: ``cat a.gz b.gz`` makes a file of two.

A file that ends inside of a member, or goes on with anything else, is an error. Python's own readers of bzip2 and xz
would take it for the end.
"""

import gzip
import io
import lzma
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import pyarrow as pa

from rosebatch.io.formats import Compression

_READ_BYTES = 1 << 18
# The padding of xz comes in groups of so many zeros.
_PADDING = 4


def decompressed(raw: IO[bytes], compression: Compression) -> io.BufferedReader:
    """The contents of a compressed file. Closing them closes the file.

    Damage raises OSError where it is met, with what is wrong as its text.
    """
    source = _Xz(raw) if compression == "xz" else pa.CompressedInputStream(pa.PythonFile(raw, "r"), compression)
    return io.BufferedReader(_Checked(source, raw, compression), _READ_BYTES)


def open_compressed(path: Path, compression: Compression | None) -> IO[bytes]:
    """Open a file to write, compressed or not. The same contents give the same bytes: no time or name is stored.

    Raises:
        OSError: it cannot be opened.
    """
    file = path.open("wb")
    if compression is None:
        return file
    make: dict[str, Callable[[], Any]] = {
        "gzip": lambda: gzip.GzipFile("", "wb", 6, file, mtime=0),
        "zstd": lambda: pa.CompressedOutputStream(pa.PythonFile(file, "w"), "zstd"),
        "bz2": lambda: pa.CompressedOutputStream(pa.PythonFile(file, "w"), "bz2"),
        "xz": lambda: lzma.LZMAFile(file, "wb"),  # noqa: SIM115
    }
    return io.BufferedWriter(_Packing(make[compression](), file), _READ_BYTES)


class _Checked(io.RawIOBase):
    """Gives all errors of a decompressor one form."""

    def __init__(self, source: Any, raw: IO[bytes], compression: Compression) -> None:
        self._source = source
        self._raw = raw
        self._compression = compression

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview") -> int:  # type: ignore[override]
        try:
            data = self._source.read(len(buffer))
        except (OSError, EOFError, lzma.LZMAError, pa.ArrowException) as error:
            if getattr(error, "errno", None) is not None:
                raise
            what = "it ends too early" if "runcated" in str(error) else str(error)
            raise OSError(f"damaged {self._compression} data: {what}") from None
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            with suppress(OSError, ValueError, pa.ArrowException):
                self._source.close()
            self._raw.close()
        super().close()


class _Xz:
    """The streams of an xz file, one after the other."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)

    def read(self, size: int) -> bytes:
        while True:
            if self._stream.eof:
                rest = self._without_padding(self._stream.unused_data)
                if not rest:
                    return b""
                self._stream = lzma.LZMADecompressor(lzma.FORMAT_XZ)
            else:
                rest = self._raw.read(_READ_BYTES) if self._stream.needs_input else b""
                if not rest and self._stream.needs_input:
                    raise EOFError("truncated")
            if data := self._stream.decompress(rest, size):
                return data

    def _without_padding(self, data: bytes) -> bytes:
        """What follows the zeros between two streams; empty at the end of the file."""
        zeros = 0
        while True:
            rest = data.lstrip(b"\0")
            zeros += len(data) - len(rest)
            if rest or not (data := self._raw.read(_READ_BYTES)):
                break
        if zeros % _PADDING:
            raise EOFError("truncated")
        return rest

    def close(self) -> None:
        self._raw.close()


class _Packing(io.RawIOBase):
    """Closes a compressor, then the file that it writes to."""

    def __init__(self, packer: Any, file: IO[bytes]) -> None:
        self._packer = packer
        self._file = file

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._packer.write(data)
        return memoryview(data).nbytes

    def close(self) -> None:
        if not self.closed:
            try:
                self._packer.close()
            finally:
                self._file.close()
        super().close()
