"""Where complete results appear: a file, or a folder of Parquet files, whole or not at all."""

import errno
import stat
from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Protocol

from rosebatch.core.errors import FlagError
from rosebatch.host.sync import sync
from rosebatch.io.compressed import open_compressed
from rosebatch.io.failed_write import writing
from rosebatch.io.formats import Compression, named
from rosebatch.io.parquet import PART_NAME, Rows


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
            FailedRunError: a file cannot be written.
        """
        failed = partial(results.rows, failed=True)
        rows = partial(results.rows, failed=None if self.errors is None else False)
        try:
            with writing(self.path, kept):
                _prepare(self.path, self.write, rows)
            if isinstance(self.errors, Path) and results.num_failed:
                with writing(self.errors, kept):
                    _prepare(self.errors, jsonl_writer(self.errors.name), failed)
            with writing(self.path, kept):
                self._appear(self.path)
            if self.errors is not None:
                # Only now: older errors belong to the older output.
                with writing(self.errors, kept):
                    self._write_errors(self.errors, failed if results.num_failed else None)
        finally:
            for path in (self.path, self.errors):
                if isinstance(path, Path):
                    # The next run deletes it too.
                    with suppress(OSError):
                        _remove(beside(path))

    def _write_errors(self, errors: Path | IO[bytes], rows: Rows | None) -> None:
        """Put the error rows in their place; None: there are none."""
        if not isinstance(errors, Path):
            for row in rows() if rows else ():
                errors.write(row + b"\n")
            errors.flush()
        elif rows:
            self._appear(errors)
        else:
            (self.remove or _remove)(errors)

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
    """Write a whole file or folder next to its path."""
    whole = beside(path)
    # A run that died may have left one.
    _remove(whole)
    write(whole, rows)
    for each in [*whole.iterdir(), whole] if whole.is_dir() else [whole]:
        sync(each)


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


def write_whole(path: Path, content: bytes, temporary: Path) -> None:
    """Write a small file that is on the disk whole, or not there: under a temporary name first.

    Raises:
        OSError: it cannot be written.
    """
    try:
        temporary.write_bytes(content)
        sync(temporary)
        replace_file(temporary, path)
        sync(path.parent)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


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
