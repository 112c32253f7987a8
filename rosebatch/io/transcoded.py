"""UTF-16 text as UTF-8: PowerShell and spreadsheets write it. Its byte order mark tells."""

import codecs
import io
from typing import IO

_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_READ_BYTES = 1 << 18
# Of the text that comes of two bytes.
_UTF8_BYTES = 3


def is_utf16(head: bytes) -> bool:
    """Whether a file with these first bytes is UTF-16."""
    return head.startswith(_MARKS)


def transcoded(raw: IO[bytes]) -> io.BufferedReader:
    """The contents of a file in UTF-16 as UTF-8. Closing them closes the file. Bad text raises OSError."""
    return io.BufferedReader(_Utf8(raw), _READ_BYTES)


class _Utf8(io.RawIOBase):
    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self._decoder = codecs.getincrementaldecoder("utf-16")()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "memoryview") -> int:  # type: ignore[override]
        text = ""
        while not text:
            # An odd byte, or half of a pair, waits for the rest.
            data = self._raw.read(max(2, len(buffer) // _UTF8_BYTES - 4))
            try:
                text = self._decoder.decode(data, final=not data)
            except UnicodeDecodeError as error:
                raise OSError(f"damaged UTF-16: {error.reason}") from None
            if not data:
                break
        encoded = text.encode()
        buffer[: len(encoded)] = encoded
        return len(encoded)

    def close(self) -> None:
        if not self.closed:
            self._raw.close()
        super().close()
