"""UTF-16 text as UTF-8: PowerShell and spreadsheets write it. Its byte order mark tells."""

import codecs
import io
import re
from typing import IO

from rosebatch.core.errors import UserError

# How text in other encodings begins: with a mark, or with ASCII, as JSON does.
_OTHERS = {
    "UTF-32": re.compile(rb"\xff\xfe\0\0|\0\0\xfe\xff"),
    "UTF-32LE": re.compile(rb"([\t\n\r -~]\0\0\0){2}"),
    "UTF-32BE": re.compile(rb"(\0\0\0[\t\n\r -~]){2}"),
    "UTF-16LE": re.compile(rb"([\t\n\r -~]\0){2}"),
    "UTF-16BE": re.compile(rb"(\0[\t\n\r -~]){2}"),
}
_MARKS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
_READ_BYTES = 1 << 18
# Of the text that comes of two bytes.
_UTF8_BYTES = 3


def is_utf16(head: bytes) -> bool:
    """Whether a file with these first bytes is UTF-16."""
    return head.startswith(_MARKS)


def require_read(path: str, head: bytes) -> None:
    """Check that a file with these first bytes is no text that is not read.

    Raises:
        UserError: it is UTF-32, or UTF-16 without its byte order mark.
    """
    if name := next((name for name, form in _OTHERS.items() if form.match(head)), None):
        way = f"UTF-8 is read, and UTF-16 with a byte order mark; convert it with iconv -f {name} -t UTF-8"
        raise UserError(f"{'stdin' if path == '-' else path}: is text in {name}, but {way}")


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
