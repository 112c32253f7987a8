"""Lines of files that are read a second time, each by its place."""

import os
from bisect import bisect
from collections.abc import Mapping
from contextlib import ExitStack
from typing import IO, Any, Self

from rosebatch.core.errors import UserError
from rosebatch.io.hive import text_with_keys
from rosebatch.io.input_files import InputFiles
from rosebatch.io.parse import Record

# That are open at once.
_MAX_FILES = 64


class ReadAgain:
    """Reads rows again that were read in order before. Files are closed at the end of the ``with`` block."""

    def __init__(self, files: InputFiles) -> None:
        self._files = files
        self._opened = ExitStack()
        # Of each file the number of its first row, and the keys of its folders.
        self._firsts: list[int] = []
        self._contents: list[tuple[str, IO[bytes], Mapping[str, Any]]] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()

    def begin(self, path: str, number: int, keys: Mapping[str, Any]) -> bool:
        """Begin a file of lines, whose first row has this number. Returns whether they can be read again."""
        if len(self._firsts) == _MAX_FILES or not self._files.has_places(path):
            return False
        self._firsts.append(number)
        self._contents.append((path, self._opened.enter_context(self._files.open(path)), keys))
        return True

    def text(self, row: Record) -> bytes:
        """The content of a row, which was read before.

        Raises:
            UserError: the file cannot be read.
        """
        assert row.place is not None, "the row is in a file that has places"
        path, file, keys = self._contents[bisect(self._firsts, row.number) - 1]
        try:
            text = os.pread(file.fileno(), row.size, row.place)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}") from None
        return text_with_keys(text, keys) if keys else text
