"""Lines of files that are read a second time, each by its place."""

import os
from bisect import bisect
from collections.abc import Mapping
from contextlib import ExitStack
from typing import IO, Any, Self

from msgspec.structs import replace

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

    def with_contents(self, rows: list[Record]) -> list[Record]:
        """Rows that were read before; those with a ``place`` get their contents.

        Raises:
            UserError: a file cannot be read, or has changed since it was hashed.
        """
        while True:
            read: set[int] = set()
            found = [row if row.place is None else self._with_content(row, row.place, read) for row in rows]
            if all(self._files.is_same(*self._contents[number][:2]) for number in read):
                return found

    def _with_content(self, row: Record, place: int, read: set[int]) -> Record:
        number = bisect(self._firsts, row.number) - 1
        read.add(number)
        path, file, keys = self._contents[number]
        try:
            text = os.pread(file.fileno(), row.size, place)
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}") from None
        return replace(row, content=text_with_keys(text, keys) if keys else text, place=None)
