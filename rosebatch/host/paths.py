"""What a local path leads to, and whether two names are one file."""

import os
import re
import stat
from pathlib import Path
from typing import IO, Any, cast

# As /dev/stdin, /dev/fd/N and the shell's <(command) resolve.
_DESCRIPTOR = re.compile(r"/proc/(\d+)/(?:task/\d+/)?fd/(\d+)|/dev/fd/(\d+)")
_MAX_LINKS = 40


def descriptor_of(path: str | Path) -> int | None:
    """The open descriptor of this process that a path such as ``/dev/stdout`` or ``/dev/fd/3`` names."""
    name = os.fspath(path)
    for _ in range(_MAX_LINKS):
        name = os.path.join(os.path.realpath(os.path.dirname(name)), os.path.basename(name))  # noqa: PTH118, PTH119, PTH120
        match = _DESCRIPTOR.fullmatch(name)
        if match and match[1] in (None, str(os.getpid())):
            return int(match[2] or match[3])
        if match or not os.path.islink(name):  # noqa: PTH114
            return None
        name = os.path.join(os.path.dirname(name), os.readlink(name))  # noqa: PTH115, PTH118, PTH120
    return None


def is_stream(path: str | Path) -> bool:
    """Whether the path leads to a pipe, a device or a socket: nothing that could be renamed or read twice."""
    try:
        mode = os.stat(path).st_mode  # noqa: PTH116
    except OSError:
        return False
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))


def may_reach_terminal(path: str | Path) -> bool:
    """Whether what is written there may be printed on a terminal: there, or through a pipe, such as that to ``jq``."""
    try:
        state = os.stat(path)  # noqa: PTH116
        is_null = state.st_rdev == os.stat(os.devnull).st_rdev  # noqa: PTH116
    except OSError:
        return False
    return stat.S_ISFIFO(state.st_mode) or (stat.S_ISCHR(state.st_mode) and not is_null)


def takes_rows_in_order(path: str | Path) -> bool:
    """Whether an output path is written row by row: a stream, or an open descriptor of whatever kind."""
    return descriptor_of(path) is not None or is_stream(path)


def open_stream(path: str | Path, mode: str) -> IO[bytes]:
    """Open a stream for ``rb`` or ``wb``. A descriptor is duplicated: it keeps its place, and sockets work too.

    Raises:
        OSError: it cannot be opened.
    """
    number = descriptor_of(path)
    if number is None:
        # Never creates or empties a file. A terminal does not become the process's own.
        flags = os.O_WRONLY if mode == "wb" else os.O_RDONLY
        opened = os.open(path, flags | os.O_NOCTTY | os.O_CLOEXEC)
    else:
        opened = os.dup(number)
    # Unlike a descriptor's, this file has the path's name.
    return cast(IO[bytes], open(path, mode, opener=lambda *_: opened))


def identity(path: str | Path) -> tuple[Any, ...] | None:
    """What two names of one file have in common: links, relative paths and other spellings do not matter.

    None for a character device such as ``/dev/null`` or a socket: any number of readers and writers may share it.
    """
    try:
        found = os.stat(path)  # noqa: PTH116
    except OSError:
        real = Path(os.path.realpath(path))
        # Two missing files whose names differ only in case are one file on some systems.
        name = real.name.casefold()
        return ("missing", str(real.parent) if real.parent == real else _identity_of_folder(real.parent), name)
    return None if stat.S_ISCHR(found.st_mode) or stat.S_ISSOCK(found.st_mode) else (found.st_dev, found.st_ino)


def _identity_of_folder(path: Path) -> Any:
    try:
        found = path.stat()
    except OSError:
        return str(path).casefold()
    return (found.st_dev, found.st_ino)


def is_inside(path: str | Path, folder: str | Path) -> bool:
    """Whether a path lies in a folder, at whatever depth. The folder need not exist."""
    return Path(os.path.realpath(folder)) in Path(os.path.realpath(path)).parents
