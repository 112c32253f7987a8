"""Where results go: to a file or folder that appears whole under its name, or row by row to a stream."""

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

# Results that a stream holds back until the row before them is there.
_MOST_HELD = 4096


class Output(Protocol):
    """Takes each row's result once, in any order."""

    def __contains__(self, index: int) -> bool:
        """Whether the row has its result, of an earlier run perhaps."""
        ...

    @property
    def created(self) -> int:
        """When the run began, or the one that it resumes: seconds since 1970."""
        ...

    @property
    def num_rows(self) -> int:
        """Results so far, those of the run that is resumed included."""
        ...

    @property
    def num_failed(self) -> int:
        """Of these, error rows."""
        ...

    @property
    def kept(self) -> str:
        """Where a run that ends early leaves its results, for people; empty where it leaves none."""
        ...

    @property
    def full(self) -> bool:
        """Whether rows should be finished before more are begun."""
        ...

    def add(self, index: int, row: dict[str, Any], *, failed: bool) -> None:
        """Take a result."""
        ...

    def flush(self) -> None:
        """Let nothing that was added depend on this process any longer."""
        ...

    def finish(self) -> None:
        """Make the output visible, in input order, when every row has its result."""
        ...

    def close(self) -> None:
        """Give up, or be done: nothing more appears; what is there stays for a run that resumes."""
        ...


class StreamOutput:
    """JSONL to a stream, in input order: a row waits for those before it."""

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
        """Write the row, and those that waited for it, or keep it until its turn."""
        self.num_rows += 1
        self.num_failed += failed
        self._held[index] = row
        while self._next in self._held:
            row = self._held.pop(self._next)
            self._stream.write(msgspec.json.encode(row, enc_hook=str) + b"\n")
            self._next += 1

    def flush(self) -> None:
        """For whoever reads along."""
        self._stream.flush()

    def finish(self) -> None:
        """The last row was written when it came."""
        assert not self._held, "every row has its result"
        self._stream.flush()

    def close(self) -> None:
        """The stream is not ours to close."""


class FileOutput:
    """Results in a part file, and once they are all there in a file, or a folder of Parquet parts, of their own.

    Args:
        part: this run's, or that of the run it resumes.
        path: of the finished file or folder, beside the part file.
        write: makes it of all rows, each as JSON, in input order.
        fields: of a row, those that the part file keeps; None for all.
        errors: where error rows go, if there are any, in place of the finished file.
        place: brings a whole file or folder, which is its first argument, to its path.
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
        """From the manifest."""
        return int(self._part.manifest["created"])

    @property
    def num_rows(self) -> int:
        """In the part file."""
        return self._part.num_rows

    @property
    def num_failed(self) -> int:
        """In the part file."""
        return self._part.num_failed

    @property
    def kept(self) -> str:
        """How many rows a run that resumes will find."""
        return f": {self.num_rows} rows are in {self._part.path}, --resume goes on with them" if self.num_rows else ""

    @property
    def full(self) -> bool:
        """Never: the part file takes rows in any order."""
        return False

    def add(self, index: int, row: dict[str, Any], *, failed: bool) -> None:
        """Append the row to the part file."""
        if self._fields is not None:
            row = {name: value for name, value in row.items() if name in self._fields}
        self._part.append(index, row, failed=failed)

    def flush(self) -> None:
        """To the system: the disk gets it a second or two later."""
        self._part.flush()

    def finish(self) -> None:
        """Write the file beside its place and rename it: whoever looks sees the old one or the new one, whole."""
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
            # What a run that died has left.
            _remove(whole)
            write(whole, rows)
            for each in [*whole.iterdir(), whole] if whole.is_dir() else [whole]:
                _sync(each)
            self._place(whole, path)
        finally:
            _remove(whole)
        _sync(path.parent)

    def close(self) -> None:
        """Leave the part file, if it holds any result."""
        if self._part.num_rows:
            self._part.close()
        else:
            self._part.remove()


def write_jsonl(path: Path, rows: Rows) -> None:
    """A line for each row."""
    with path.open("wb") as file:
        for row in rows():
            file.write(row + b"\n")


def beside(path: Path) -> Path:
    """Where a file or folder is made, until it is whole."""
    return path.with_name(path.name + ".tmp")


def aside(path: Path) -> Path:
    """Where a folder is, while another takes its place."""
    return path.with_name(path.name + ".old")


def replace_folder(whole: Path, path: Path) -> None:
    """Bring a folder of parts to its path. One that is there is deleted after that, and until then lies aside.

    Raises:
        OSError: one of them cannot be renamed.
    """
    if path.exists():
        # Left by a run that died before it had deleted it.
        _remove(aside(path))
        path.rename(aside(path))
    whole.rename(path)
    _sync(path.parent)
    _remove(aside(path))


def require_parts(folder: Path) -> None:
    """Check that nothing is lost when a folder is replaced.

    Raises:
        FlagError: it is none, or holds more than parts.
    """
    if not folder.exists():
        return
    if not folder.is_dir():
        raise FlagError(f"{folder}: is a file, name another folder for the results")
    foreign = min((each.name for each in folder.iterdir() if not _is_part(each)), default=None)
    if foreign is not None:
        raise FlagError(
            f"{folder}: holds {foreign}, and a folder of results holds part-NUMBER.parquet alone; name another"
        )


def _is_part(path: Path) -> bool:
    return PART_NAME.fullmatch(path.name) is not None and not path.is_dir()


def _remove(path: Path) -> None:
    """Delete a file, or a folder of parts; what else came to be in it stays, and so does the folder then."""
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
