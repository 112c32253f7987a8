"""Before a run: no two of its paths are one file, nothing foreign is in its way, and all can be written."""

import os
import shlex
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rosebatch.core.errors import FlagError, UserError
from rosebatch.host import paths
from rosebatch.io.files import is_url, url_identity
from rosebatch.io.find_files import would_find
from rosebatch.io.part_lines import begins_part_file

# Bytes of a file that show whose it is.
_HEAD = 64
# The end of the name of a file that is made to see whether one can be made.
_TRIAL = "~try"
# Names of reports.
_REPORTS = ("", ".json", ".html", ".htm")


@dataclass(frozen=True, slots=True)
class Used:
    """A path that a run reads or writes.

    Attributes:
        what: for messages: the output, the report.
        path: local path or URL.
        is_folder: whether all that lies in it is replaced.
    """

    what: str
    path: str
    is_folder: bool = False

    def __str__(self) -> str:
        return f"{self.what} {self.path}"


def require_apart(reads: Iterable[Used], writes: Iterable[Used]) -> None:
    """Check that nothing written is another path of the run, however each is spelled.

    Raises:
        FlagError: two are one file, or one lies in a folder that is replaced.
    """
    reads, writes = list(reads), list(writes)
    seen = {_identity(each.path): each for each in reads}
    for each in writes:
        key = _identity(each.path)
        if key is not None and key in seen:
            raise FlagError(f"{each} is the same file as {seen[key]}: choose another name for one of them")
        seen[key] = each
    for folder in (each for each in writes if each.is_folder and not is_url(each.path)):
        for each in [*reads, *writes]:
            if each is not folder and not is_url(each.path) and paths.is_inside(each.path, folder.path):
                raise FlagError(f"{each} lies in {folder}, which is replaced: choose another folder")


def require_not_read(source: str, writes: Iterable[Used]) -> None:
    """Check that the next run of the same command does not take this one's files for input.

    Args:
        source: the folder or glob of the input.
        writes: all that this run writes.

    Raises:
        FlagError: it would.
    """
    for each in writes:
        written = f"{each.path.rstrip('/')}/part-00000.parquet" if each.is_folder else each.path
        if is_url(each.path) == is_url(source) and would_find(source, written):
            raise FlagError(f"{each} would be found by the next run of {source}: choose another folder for it")


def require_report(path: Path) -> None:
    """Check that a report can be written: a page, JSON, or a stream of any name. Nothing changes on the disk.

    Raises:
        FlagError: the name is of another format.
        UserError: the file cannot be made or written.
    """
    if paths.takes_rows_in_order(path):
        return
    if path.suffix.lower() not in _REPORTS:
        raise FlagError(f"--report {path}: is written as .html or .json; name such a file")
    real = os.path.realpath(path)
    try:
        try:
            descriptor = os.open(real, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            os.close(os.open(real, os.O_WRONLY | os.O_NONBLOCK))
        else:
            os.close(descriptor)
            os.unlink(real)  # noqa: PTH108
    except OSError as error:
        raise UserError(f"--report {path}: {_reason(error, path)}") from None


def require_creatable(path: Path, shown: str) -> None:
    """Check that a file of this length of name can be made in this folder, without touching that very name.

    Another run may be about to make it. A run that is killed here leaves an empty file, which the next one deletes.

    Args:
        path: of at least four characters.
        shown: for messages.

    Raises:
        UserError: it cannot.
    """
    trial = path.with_name(path.name[:-4] + _TRIAL)
    try:
        os.close(os.open(trial, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666))
    except OSError as error:
        raise UserError(f"{shown}: {_reason(error, path)}") from None
    # Another run may try the same.
    with suppress(FileNotFoundError):
        if not trial.stat().st_size:
            trial.unlink()


def _reason(error: OSError, path: Path) -> str:
    """Why a file cannot be made."""
    folder = path.parent
    if isinstance(error, FileNotFoundError) and not folder.exists():
        return f"the folder {folder} is missing: mkdir -p {shlex.quote(str(folder))}"
    return error.strerror or str(error)


def require_replaceable_file(path: Path) -> None:
    """Check that a file may be renamed to a path.

    Raises:
        FlagError: something other than a file is there, or a mount, or a file whose mode hides what it holds.
    """
    mode = _mode(path)
    if mode is not None and not stat.S_ISREG(mode):
        raise FlagError(f"{path}: is no regular file, name another")
    if os.path.ismount(path):
        raise FlagError(f"{path}: is a mount of its own and cannot be replaced, name a file in a folder")
    if mode is not None and not mode & stat.S_IRUSR:
        raise FlagError(f"{path}: its mode does not let its owner read it, and results keep the mode: delete it")


def require_own_part(part: Path) -> None:
    """Check that a part file is of some run, or not there.

    Raises:
        FlagError: it is something else.
    """
    mode = _mode(part)
    if mode is None:
        return
    if stat.S_ISREG(mode):
        with suppress(OSError), part.open("rb") as file:
            if begins_part_file(file.read(_HEAD)):
                return
    raise FlagError(f"{part}: is no part file of rosebatch, but the results need this name; rename it or -o")


def require_left_by_a_run(temporary: Path, part: Path, *, is_folder: bool) -> None:
    """Check that a temporary file or folder, which the run deletes, is of an earlier run: it has a part file too.

    Raises:
        FlagError: it is something else.
    """
    mode = _mode(temporary)
    if mode is not None and not (_mode(part) is not None and (stat.S_ISDIR if is_folder else stat.S_ISREG)(mode)):
        raise FlagError(f"{temporary}: was not left by an earlier run, but the results need this name; rename it or -o")


def _mode(path: Path) -> int | None:
    """What is at a path; of a link, the link itself."""
    try:
        return path.lstat().st_mode
    except OSError:
        return None


def _identity(path: str) -> tuple[Any, ...] | None:
    return ("url", url_identity(path)) if is_url(path) else paths.identity(path)
