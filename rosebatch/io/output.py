"""Where results go: to a file or folder that appears only when it is whole, or row by row to a stream."""

import os
from collections.abc import Callable, Container
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from rosebatch.errors import FlagError, UserError
from rosebatch.io.parquet import PART_NAME, Rows
from rosebatch.io.part_file import PartFile

# Results that a stream holds back while it waits for an earlier row.
_MOST_HELD = 4096


class Output(Protocol):
    """Takes one result for each row, in any order."""

    def __contains__(self, index: int) -> bool:
        """Whether the row already has its result, perhaps from an earlier run."""
        ...

    @property
    def created(self) -> int:
        """When the run began, in seconds since 1970. A resumed run keeps the time of the first one."""
        ...

    @property
    def num_rows(self) -> int:
        """Results so far, including those of the resumed run."""
        ...

    @property
    def num_failed(self) -> int:
        """Error rows among them."""
        ...

    @property
    def kept(self) -> str:
        """For people: where a run that ends early leaves its results. Empty if it leaves none."""
        ...

    @property
    def full(self) -> bool:
        """Whether rows must finish before more may start."""
        ...

    def add(self, index: int, row: dict[str, Any], *, failed: bool) -> None:
        """Take a result."""
        ...

    def flush(self) -> None:
        """Pass everything on: the end of this process then loses nothing."""
        ...

    def finish(self) -> None:
        """Make the output visible, in input order. Every row must have its result."""
        ...

    def close(self) -> None:
        """Release the output. Nothing more appears; unfinished results stay for a run that resumes."""
        ...


class StreamOutput:
    """JSONL on a stream, in input order: a row waits for all rows before it."""

    def __init__(self, stream: IO[bytes], created: int = 0) -> None:
        self.created = created
        self._stream = stream
        self._next = 0
        self._held: dict[int, dict[str, Any]] = {}
        self.num_rows = 0
        self.num_failed = 0
        self.kept = ""

    def __contains__(self, index: int) -> bool:
        return index < self._next or index in self._held

    @property
    def full(self) -> bool:
        """Whether thousands of results wait for one row."""
        return len(self._held) >= _MOST_HELD

    def add(self, index: int, row: dict[str, Any], *, failed: bool) -> None:
        """Write the row and those that waited for it, or hold it until its turn."""
        self.num_rows += 1
        self.num_failed += failed
        self._held[index] = row
        while self._next in self._held:
            row = self._held.pop(self._next)
            self._stream.write(msgspec.json.encode(row, enc_hook=str) + b"\n")
            self._next += 1

    def flush(self) -> None:
        """Show the rows so far to whoever reads the stream."""
        self._stream.flush()

    def finish(self) -> None:
        """Flush; ``add`` has already written every row."""
        assert not self._held, "every row has its result"
        self._stream.flush()

    def close(self) -> None:
        """Does nothing: the stream belongs to the caller."""


class FileOutput:
    """Results in a part file. Once complete, they become a file, or a folder of Parquet files.

    Args:
        part: the part file of this run, or of the run that it resumes.
        path: the finished file or folder, beside the part file.
        write: writes the finished file or folder from all rows, each as JSON, in input order.
        fields: the fields of a row that the part file keeps; None keeps all.
        errors: a file of its own for error rows, written if there are any; None puts them into the output.
        place: moves a whole file or folder, its first argument, to its path, the second.
    """

    def __init__(
        self,
        part: PartFile,
        path: Path,
        write: Callable[[Path, Rows], None],
        fields: Container[str] | None = None,
        errors: Path | None = None,
        place: Callable[[Path, Path], object] = Path.replace,
    ) -> None:
        self._part = part
        self._path = path
        self._write = write
        self._fields = fields
        self._errors = errors
        self._place = place

    def __contains__(self, index: int) -> bool:
        return index in self._part

    @property
    def created(self) -> int:
        """The time in the manifest."""
        return int(self._part.manifest["created"])

    @property
    def num_rows(self) -> int:
        """Rows in the part file."""
        return self._part.num_rows

    @property
    def num_failed(self) -> int:
        """Error rows in the part file."""
        return self._part.num_failed

    @property
    def kept(self) -> str:
        """How many rows the part file holds, and how to continue."""
        if not self.num_rows:
            return ""
        return f": {self.num_rows} rows are saved in {self._part.path}; rerun with --resume to continue"

    @property
    def full(self) -> bool:
        """Always False: the part file takes rows in any order."""
        return False

    def add(self, index: int, row: dict[str, Any], *, failed: bool) -> None:
        """Append the row to the part file."""
        if self._fields is not None:
            row = {name: value for name, value in row.items() if name in self._fields}
        self._part.append(index, row, failed=failed)

    def flush(self) -> None:
        """Hand the rows to the system. They reach the disk a second or two later."""
        self._part.flush()

    def finish(self) -> None:
        """Write the output under a temporary name, then rename it: readers see the old or the new one, whole.

        Raises:
            UserError: the output cannot be written. The part file stays.
        """
        self._part.sync()
        try:
            if self._errors is None:
                self._finish(self._path, self._write, self._part.rows)
            else:
                self._errors.unlink(missing_ok=True)
                if self.num_failed:
                    self._finish(self._errors, write_jsonl, partial(self._part.rows, failed=True))
                self._finish(self._path, self._write, partial(self._part.rows, failed=False))
        except OSError as error:
            raise UserError(f"{self._path}: {error.strerror or error}{self.kept}") from None
        self._part.remove()

    def _finish(self, path: Path, write: Callable[[Path, Rows], None], rows: Rows) -> None:
        whole = beside(path)
        try:
            # A run that died may have left one.
            _remove(whole)
            write(whole, rows)
            for each in [*whole.iterdir(), whole] if whole.is_dir() else [whole]:
                _sync(each)
            self._place(whole, path)
        finally:
            _remove(whole)
        _sync(path.parent)

    def close(self) -> None:
        """Release the part file. Delete it if it holds no result."""
        if self._part.num_rows:
            self._part.close()
        else:
            self._part.remove()


def write_jsonl(path: Path, rows: Rows) -> None:
    """Write one line for each row."""
    with path.open("wb") as file:
        for row in rows():
            file.write(row + b"\n")


def beside(path: Path) -> Path:
    """The temporary path of a file or folder, until it is whole."""
    return path.with_name(path.name + ".tmp")


def aside(path: Path) -> Path:
    """The path of an old folder while a new one takes its place."""
    return path.with_name(path.name + ".old")


def replace_folder(whole: Path, path: Path) -> None:
    """Move a folder of parts to its path. An existing folder is renamed first and deleted last.

    Raises:
        OSError: a folder cannot be renamed.
    """
    if path.exists():
        # A run that died may have left an older one.
        _remove(aside(path))
        path.rename(aside(path))
    whole.rename(path)
    _sync(path.parent)
    _remove(aside(path))


def require_parts(folder: Path) -> None:
    """Check that replacing a folder loses nothing.

    Raises:
        FlagError: the path is a file, or the folder holds more than parts.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FlagError(f"{folder}: is a file; choose another folder for the results")
    foreign = min((each.name for each in folder.iterdir() if not _is_part(each)), default=None)
    if foreign is not None:
        raise FlagError(
            f"{folder}: holds {foreign}, but a results folder may only hold part-NUMBER.parquet files; choose another"
        )


def _is_part(path: Path) -> bool:
    return PART_NAME.fullmatch(path.name) is not None and not path.is_dir()


def _remove(path: Path) -> None:
    """Delete a file or a folder of parts. Anything else in the folder stays, and so does the folder then."""
    if path.is_dir():
        for part in filter(_is_part, list(path.iterdir())):
            part.unlink()
        with suppress(OSError):
            path.rmdir()
    else:
        path.unlink(missing_ok=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
