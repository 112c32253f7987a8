"""Compressed files as streams. All members of a file are read: ``cat a.gz b.gz`` makes a file of two.

A file that ends inside of a member, or goes on with anything else, is an error. Python's own readers of bzip2 and xz
would take it for the end.
"""

import gzip
import io
import lzma
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import IO, Any, cast

import pyarrow as pa

from rosebatch.io.formats import Compression

_READ_BYTES = 1 << 18
# Of compressed data, at once. What a step of zlib leaves is copied in each: of zeros, that is nearly all of it.
_PACKED_BYTES = 1 << 15
# Of a first frame of zstd: what says how far it refers back.
_FRAME_HEADER = 18
_LARGEST_WINDOW = 1 << 27
_LONGEST_WINDOW_LOG = 31
_LONG_WINDOW = "its zstd window is larger than 128 MiB"


def decompressed(raw: io.BufferedReader, compression: Compression) -> io.BufferedReader:
    """The contents of a compressed file. Closing them closes the file.

    Damage raises OSError where it is met, with what is wrong as its text.
    """
    make: dict[str, Callable[[], Any]] = {
        "gzip": lambda: _Members(raw, _Gzip, 1),
        "zstd": lambda: _zstd(raw),
        "bz2": lambda: pa.CompressedInputStream(pa.PythonFile(raw, "r"), "bz2"),
        "xz": lambda: _Members(raw, partial(lzma.LZMADecompressor, lzma.FORMAT_XZ), 4),
    }
    return io.BufferedReader(_Checked(make[compression](), raw, compression), _READ_BYTES)


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
        except (OSError, EOFError, lzma.LZMAError, zlib.error, pa.ArrowException) as error:
            if getattr(error, "errno", None) is not None:
                raise
            what = "it ends too early" if "runcated" in str(error) else str(error)
            if "too much memory" in what:
                what = f"{_LONG_WINDOW} behind its first frame"
            raise OSError(f"damaged {self._compression} data: {what}") from None
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            with suppress(OSError, ValueError, pa.ArrowException):
                self._source.close()
            self._raw.close()
        super().close()


class _Members:
    """The members of a gzip or xz file, one after the other. Zeros may stand behind each, as on tapes and in blocks.

    Args:
        raw: the file.
        make: a decompressor of one member, as of ``lzma``.
        padding: zeros come in groups of so many.
    """

    def __init__(self, raw: IO[bytes], make: Callable[[], Any], padding: int) -> None:
        self._raw = raw
        self._make = make
        self._padding = padding
        self._stream = make()

    def read(self, size: int) -> bytes:
        while True:
            if self._stream.eof:
                rest = self._without_padding(self._stream.unused_data)
                if not rest:
                    return b""
                self._stream = self._make()
            else:
                rest = self._raw.read(_PACKED_BYTES) if self._stream.needs_input else b""
                if not rest and self._stream.needs_input:
                    raise EOFError("truncated")
            if data := self._stream.decompress(rest, size):
                return cast(bytes, data)

    def _without_padding(self, data: bytes) -> bytes:
        """What follows the zeros between two members; empty at the end of the file."""
        zeros = 0
        while True:
            rest = data.lstrip(b"\0")
            zeros += len(data) - len(rest)
            if rest or not (data := self._raw.read(_READ_BYTES)):
                break
        if zeros % self._padding:
            raise EOFError("truncated")
        return rest

    def close(self) -> None:
        self._raw.close()


class _Gzip:
    """A member of a gzip file, with the methods of ``lzma.LZMADecompressor``."""

    needs_input = True

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(zlib.MAX_WBITS | 16)

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def decompress(self, data: bytes, size: int) -> bytes:
        found = self._stream.decompress(self._stream.unconsumed_tail + data, size)
        # A full buffer may have left some behind, inside of the decompressor too.
        self.needs_input = len(found) < size and not self._stream.unconsumed_tail
        return found


def _zstd(raw: io.BufferedReader) -> Any:
    """A reader of zstd. PyArrow's refuses a frame that refers further back than 128 MiB, as ``zstd --long`` makes."""
    if _window(raw.peek(_FRAME_HEADER)) <= _LARGEST_WINDOW:
        return pa.CompressedInputStream(pa.PythonFile(raw, "r"), "zstd")
    for name in ("compression.zstd", "backports.zstd"):
        with suppress(ImportError):
            zstd = import_module(name)
            return zstd.ZstdFile(raw, options={zstd.DecompressionParameter.window_log_max: _LONGEST_WINDOW_LOG})
    raise OSError(f"{_LONG_WINDOW}: pip install backports.zstd, or pack it again without --long")


def _window(head: bytes) -> int:
    """The bytes that a first frame of zstd refers back (RFC 8878, 3.1.1.1); 0 if it says none."""
    if len(head) < _FRAME_HEADER or not head.startswith(b"\x28\xb5\x2f\xfd"):
        return 0
    flags, window = head[4:6]
    if flags & 0x20:
        start, size = 5 + (0, 1, 2, 4)[flags & 3], (1, 2, 4, 8)[flags >> 6]
        return int.from_bytes(head[start : start + size], "little")
    size = 1 << (10 + (window >> 3))
    return size + size // 8 * (window & 7)


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
