"""Where results go: to a file or folder that appears only when it is whole, or row by row to a stream."""

import errno
import stat
from collections.abc import Callable, Collection, Container, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any, Protocol

import msgspec

from rosebatch.core.errors import FlagError, UserError
from rosebatch.host.sync import sync
from rosebatch.io.compressed import open_compressed
from rosebatch.io.formats import Compression, named
from rosebatch.io.parquet import PART_NAME, Rows
from rosebatch.io.part_file import PartFile
from rosebatch.io.part_lines import PartEncoder

# Results that a stream holds back while it waits for an earlier row, and their bytes.
_MAX_HELD = 4096
_MAX_HELD_BYTES = 64 << 20


class Encode(Protocol):
    """Makes the line of a result."""

    def __call__(self, index: int, row: dict[str, Any], *, failed: bool) -> bytes:
        """The line of a row, with its end."""
        ...


class Sink(Protocol):
    """Takes one result for each row, in any order."""

    @property
    def num_rows(self) -> int:
        """Results so far."""
        ...

    @property
    def full(self) -> bool:
        """Whether rows must finish before more may start."""
        ...

    def add(self, index: int, row: Any, *, failed: bool) -> None:
        """Take a result that was made in this process."""
        ...

    def add_lines(self, indices: Sequence[int], lines: Sequence[bytes], failed: Collection[int]) -> None:
        """Take results that workers have encoded.

        Args:
            indices: of the rows.
            lines: of each row, by the ``Encode`` of the task.
            failed: indices of the error rows.
        """
        ...

    def flush(self) -> None:
        """Pass everything on: the end of this process then loses nothing."""
        ...

    def finish(self) -> None:
        """Every row has its result."""
        ...


class Output(Sink, Protocol):
    """The file, folder or stream of a job. ``num_rows`` includes the results of the resumed run."""

    def __contains__(self, index: int) -> bool:
        """Whether the row already has its result, perhaps from an earlier run."""
        ...

    @property
    def created(self) -> int:
        """When the run began, in seconds since 1970. A resumed run keeps the time of the first one."""
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
    def encode(self) -> "Encode":
        """Makes the lines for ``add_lines``. It can be sent to another process."""
        ...

    def finish(self) -> None:
        """Make the output visible, in input order. Every row must have its result."""
        ...

    def close(self) -> None:
        """Release the output. Nothing more appears; unfinished results stay for a run that resumes."""
        ...


class StreamOutput:
    """JSONL on a stream, in input order: a row waits for all rows before it.

    Args:
        stream: takes the rows.
        created: when the run began.
        errors: a stream of its own for error rows; None puts them among the others.
        close: called at the end, to close streams that belong to nobody else.
    """

    def __init__(
        self,
        stream: IO[bytes],
        created: int = 0,
        errors: IO[bytes] | None = None,
        close: Callable[[], object] = lambda: None,
    ) -> None:
        self.created = created
        self._stream = stream
        self._errors = errors or stream
        self._close = close
        self._next = 0
        self._held: dict[int, tuple[bytes, bool]] = {}
        self._held_bytes = 0
        self.num_rows = 0
        self.num_failed = 0
        self.kept = ""
        self.encode: Encode = _encode_line

    def __contains__(self, index: int) -> bool:
        return index < self._next or index in self._held

    @property
    def full(self) -> bool:
        """Whether thousands of results, or many bytes, wait for one row."""
        return len(self._held) >= _MAX_HELD or self._held_bytes >= _MAX_HELD_BYTES

    def add(self, index: int, row: dict[str, Any], *, failed: bool) -> None:
        """Write the row and those that waited for it, or hold it until its turn."""
        self.add_lines([index], [_encode_line(index, row, failed=failed)], {index} if failed else ())

    def add_lines(self, indices: Sequence[int], lines: Sequence[bytes], failed: Collection[int]) -> None:
        """The same for several rows."""
        for index, line in zip(indices, lines, strict=True):
            self._add(index, line, index in failed)

    def _add(self, index: int, line: bytes, failed: bool) -> None:
        self.num_rows += 1
        self.num_failed += failed
        self._held[index] = line, failed
        self._held_bytes += len(line)
        while self._next in self._held:
            line, failed = self._held.pop(self._next)
            (self._errors if failed else self._stream).write(line)
            self._held_bytes -= len(line)
            self._next += 1

    def flush(self) -> None:
        """Show the rows so far to whoever reads the stream."""
        self._stream.flush()
        self._errors.flush()

    def finish(self) -> None:
        """Flush; ``add`` has already written every row."""
        assert not self._held, "every row has its result"
        self.flush()

    def close(self) -> None:
        """Close the streams, unless they belong to the caller."""
        self._close()


def _encode_line(index: int, row: dict[str, Any], *, failed: bool) -> bytes:
    return msgspec.json.encode(row, enc_hook=str) + b"\n"


class Results(Protocol):
    """Rows that have their result, each as JSON, in input order."""

    @property
    def num_failed(self) -> int:
        """Error rows among them."""
        ...

    def rows(self, *, failed: bool | None = None) -> Iterator[bytes]:
        """The error rows alone, all others, or with None both."""
        ...


@dataclass(frozen=True, slots=True)
class Placement:
    """Where complete results appear: a file, or a folder of Parquet files.

    Attributes:
        path: of the file or folder.
        write: writes it from all rows.
        fields: the fields of a row that are kept; None keeps all.
        errors: a file or stream of its own for error rows; None puts them into the output. Without error rows, an
            older file of them is deleted.
        place: moves a whole file or folder, its first argument, to its path, the second.
        remove: deletes an older file of errors.
    """

    path: Path
    write: Callable[[Path, Rows], None]
    fields: Container[str] | None = None
    errors: Path | IO[bytes] | None = None
    place: Callable[[Path, Path], object] | None = None
    remove: Callable[[Path], object] | None = None

    def appear(self, results: Results, kept: str = "") -> None:
        """Write the output under a temporary name, then rename it: readers see the old or the new one, whole.

        Args:
            results: all of them.
            kept: for people: where they are, if this fails.

        Raises:
            UserError: the output cannot be written.
        """
        failed = partial(results.rows, failed=True)
        rows = partial(results.rows, failed=None if self.errors is None else False)
        try:
            _prepare(self.path, self.write, rows)
            if isinstance(self.errors, Path) and results.num_failed:
                _prepare(self.errors, jsonl_writer(self.errors.name), failed)
            self._appear(self.path)
            # Only now: older errors belong to the older output.
            if isinstance(self.errors, Path):
                if results.num_failed:
                    self._appear(self.errors)
                else:
                    (self.remove or _remove)(self.errors)
            elif self.errors is not None:
                for row in failed():
                    self.errors.write(row + b"\n")
                self.errors.flush()
        except OSError as error:
            raise UserError(f"{self.path}: {error.strerror or error}{kept}") from None
        finally:
            for path in (self.path, self.errors):
                if isinstance(path, Path):
                    # The next run deletes it too.
                    with suppress(OSError):
                        _remove(beside(path))

    def _appear(self, path: Path) -> None:
        (self.place or replace_file)(beside(path), path)
        sync(path.parent)

    def close(self) -> None:
        """Close the stream of errors, if there is one."""
        if not isinstance(self.errors, Path | None):
            # What could not be written was an error before.
            with suppress(OSError):
                self.errors.close()


def _prepare(path: Path, write: Callable[[Path, Rows], None], rows: Rows) -> None:
    """Write a whole file or folder beside its path."""
    whole = beside(path)
    # A run that died may have left one.
    _remove(whole)
    write(whole, rows)
    for each in [*whole.iterdir(), whole] if whole.is_dir() else [whole]:
        sync(each)


class FileOutput:
    """Results in a part file, until all are there.

    Args:
        part: the part file of this run, or of the run that it resumes.
        placement: where the results appear; beside the part file.
        appeared: called once they have, before the part file is deleted.
    """

    def __init__(
        self, part: PartFile, placement: Placement, appeared: Callable[[PartFile], object] = lambda part: None
    ) -> None:
        self._part = part
        self._placement = placement
        self._appeared = appeared
        self._encode: PartEncoder | None = None

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

    @property
    def encode(self) -> PartEncoder:
        """Makes lines of this part file. The first call waits for the manifest."""
        if self._encode is None:
            self._encode = PartEncoder(self._part.begin(), self._placement.fields)
        return self._encode

    def add(self, index: int, row: dict[str, Any], *, failed: bool) -> None:
        """Append the row to the part file."""
        self.add_lines([index], [self.encode(index, row, failed=failed)], {index} if failed else ())

    def add_lines(self, indices: Sequence[int], lines: Sequence[bytes], failed: Collection[int]) -> None:
        """Append the rows to the part file."""
        self._part.append_lines(indices, lines, failed)

    def flush(self) -> None:
        """Hand the rows to the system. They reach the disk a second or two later."""
        self._part.flush()

    def finish(self) -> None:
        """Make the output of the part file, and delete that.

        Raises:
            UserError: the output cannot be written. The part file stays.
        """
        self._part.sync()
        self._placement.appear(self._part, self.kept)
        self._appeared(self._part)
        self._part.remove()

    def close(self) -> None:
        """Release the part file. Delete it if it holds no result."""
        self._placement.close()
        if self._part.num_rows:
            self._part.close()
        else:
            self._part.remove()


class ShardOutput(FileOutput):
    """Results that stay in the part file: the output needs those of other runs too."""

    _complete = False

    def finish(self) -> None:
        """Put all rows on the disk. A shard without rows has a file too."""
        self._part.begin()
        self._part.sync()
        self._complete = True

    def close(self) -> None:
        """Release the part file. Delete it if the run ended early and left no result."""
        if self._complete:
            self._part.close()
        else:
            super().close()


def jsonl_writer(name: str) -> Callable[[Path, Rows], None]:
    """What writes the lines of a file with this name, compressed as its extension says."""
    return partial(write_jsonl, compression=named(name).compression)


def write_jsonl(path: Path, rows: Rows, compression: Compression | None = None) -> None:
    """Write one line for each row."""
    with open_compressed(path, compression) as file:
        for row in rows():
            file.write(row + b"\n")


def beside(path: Path) -> Path:
    """The temporary path of a file or folder, until it is whole."""
    return path.with_name(path.name + ".tmp")


def aside(path: Path) -> Path:
    """The path of an old folder while a new one takes its place."""
    return path.with_name(path.name + ".old")


def replace_file(whole: Path, path: Path) -> None:
    """Move a file to its path. It gets the mode of the file that it replaces.

    Raises:
        OSError: it cannot be renamed, or the path has become something other than a file.
    """
    with suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EEXIST, "is no regular file any more")
        whole.chmod(stat.S_IMODE(mode))
    whole.replace(path)


def replace_folder(whole: Path, path: Path) -> None:
    """Move a folder of parts to its path, with the mode of the one that it replaces.

    An existing folder is renamed first and deleted last. If the new one cannot take its place, it returns.

    Raises:
        OSError: a folder cannot be renamed.
    """
    old = aside(path)
    replaces = path.exists()
    if replaces:
        whole.chmod(stat.S_IMODE(path.stat().st_mode))
        # A run that died may have left an older one.
        _remove(old)
        path.rename(old)
    try:
        whole.rename(path)
    except OSError:
        if replaces:
            old.rename(path)
        raise
    sync(path.parent)
    _remove(old)


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
    """Delete a file, a link or a folder of parts. Anything else in the folder stays, and so does the folder then."""
    if path.is_dir() and not path.is_symlink():
        for part in filter(_is_part, list(path.iterdir())):
            part.unlink()
        with suppress(OSError):
            path.rmdir()
    else:
        path.unlink(missing_ok=True)
