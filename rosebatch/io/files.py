"""Files by path or URL. URLs are read and written through fsspec."""

import fnmatch
import glob
import hashlib
import os
import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, cast

from rosebatch.core.errors import UserError
from rosebatch.io.formats import READ, named
from rosebatch.io.unsupported_formats import is_unsupported_data, is_visible, require_all_read

_WILD = "*?["
# A whole repository. Splits and configurations have folders of their own there.
_DATASET = re.compile(r"hf://datasets/[^/]+/[^/]+/?")


def is_url(path: str) -> bool:
    """Whether a path names a file system and a file in it, as ``s3://`` URLs do."""
    return "://" in path


def as_path(source: str) -> str:
    """A ``file://`` URL as the path that it names. Anything else stays as it is."""
    return source.removeprefix("file://") if source.startswith("file:///") else source


def url_identity(url: str) -> str:
    """The same text for every spelling of a URL that its file system reads.

    Raises:
        UserError: the file system is unknown.
    """
    file_system, inside = _remote(url)
    return str(file_system.unstrip_protocol(inside))


def file_name(path: str) -> str:
    """The last part of a path or URL, without the query of a presigned URL."""
    return (path.partition("?")[0] if is_url(path) else path).rpartition("/")[2]


def is_table(path: str) -> bool:
    """Whether the extension is of a table with types: Parquet or Arrow."""
    return named(file_name(path)).kind in ("parquet", "arrow")


def find_files(source: str) -> list[str]:
    """The files of a source, in the order of their names.

    Args:
        source: a path or URL of a file, a folder or a glob; ``-`` for stdin. A folder means the files in it that
            are read, without those whose names begin with ``.`` or ``_``; a data set on the Hub, for those at any
            depth.

    Raises:
        UserError: there are no files, or a folder has data in files that are not read.
    """
    source = as_path(source)
    paths = _find_remote(source) if is_url(source) else _find_local(source)
    if paths is None:
        return [source]
    if not paths:
        raise UserError(
            f"{source}: no files found; a folder needs .jsonl, .csv, .parquet or .arrow files, "
            "a pattern must match some"
        )
    return sorted(paths)


def open_file(path: str) -> IO[bytes]:
    """Open a file for reading, in binary.

    Raises:
        UserError: it cannot be opened.
    """
    try:
        if not is_url(path):
            return Path(path).open("rb")
        file_system, inside = _remote(path)
        return cast(IO[bytes], file_system.open(inside, "rb"))
    except UserError:
        raise
    # Each file system has errors of its own.
    except Exception as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def would_find(source: str, path: str) -> bool:
    """Whether a folder or glob would read a file, once it is there, or refuse it. Both are local, or both are URLs."""
    source = as_path(source)
    if is_url(source):
        source, path = source.rstrip("/"), url_identity(path)
        is_folder = not any(mark in source.partition("?")[0] for mark in _WILD)
        source = url_identity(source)
    else:
        is_folder = Path(source).is_dir()
        if not is_folder and Path(source).exists():
            return False
        source, path = _real_pattern(source), os.path.realpath(path)
    if not is_folder:
        return _matches(path.split("/"), source.split("/"))
    inside = path.removeprefix(f"{source}/").split("/")
    skipped = len(inside) == 1 and is_unsupported_data(inside[0])
    return path.startswith(f"{source}/") and all(map(is_visible, inside)) and (skipped or _is_data(inside[-1]))


def digest(paths: Sequence[str], opened: Callable[[str], IO[bytes]] | None = None) -> str:
    """SHA-256 of one file's contents. For several files, SHA-256 of their digests.

    Args:
        paths: of the files.
        opened: opens one of them, in place of ``open_file``.

    Raises:
        UserError: a file cannot be read.
    """
    digests = []
    for path in paths:
        with (opened or open_file)(path) as file:
            try:
                digests.append(hashlib.file_digest(cast(Any, file), "sha256").hexdigest())
            except OSError as error:
                raise UserError(f"{path}: {error.strerror or error}") from None
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


def upload(path: Path, url: str) -> None:
    """Move a local file to a URL, where it appears whole.

    Raises:
        OSError: the URL cannot be written.
    """
    file_system, inside = _remote(url)
    # Presigned URLs for uploads expect PUT.
    options = {"method": "put"} if url.startswith(("http://", "https://")) else {}
    file_system.put_file(str(path), inside, **options)
    path.unlink()


def require_writable_url(url: str) -> None:
    """Check that a file can be made at a URL, under another name. Over HTTP there is no name to try.

    Args:
        url: of a file; with ``/`` at its end, of a folder.

    Raises:
        UserError: it cannot.
    """
    if url.startswith(("http://", "https://")):
        return
    file_system, inside = _remote(url)
    folder = inside.rstrip("/") if url.endswith("/") else inside.rpartition("/")[0]
    # Always the same: the next run deletes what a killed one leaves.
    trial = f"{folder}/.rosebatch-try"
    # Each file system has errors of its own.
    try:
        file_system.pipe_file(trial, b"")
    except Exception as error:
        raise UserError(f"{url}: cannot be written ({getattr(error, 'strerror', None) or error})") from None
    with suppress(Exception):
        file_system.rm_file(trial)


def remove_url(url: str) -> None:
    """Delete the file at a URL, if there is one. HTTP has no deletion.

    Raises:
        OSError: it cannot be deleted.
    """
    if not url.startswith(("http://", "https://")):
        file_system, inside = _remote(url)
        with suppress(FileNotFoundError):
            file_system.rm_file(inside)


def _remote(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path inside it."""
    from fsspec.core import url_to_fs

    try:
        file_system, inside = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UserError(f"{url}: {error}") from None
    return file_system, inside


def _find_local(source: str) -> list[str] | None:
    """The files that a path names; None if the source is itself a file, a pipe or a device."""
    path = Path(source)
    if path.is_dir():
        names = [each.name for each in path.iterdir()]
        folders = [name for name in names if is_visible(name) and _holds_data(os.walk(path / name))]
        wanted = [name for name in names if name not in folders and _wanted(name)]
        require_all_read(source, names, folders, _pattern(str(path), wanted))
        return [str(path / name) for name in wanted]
    if source == "-" or path.exists():
        return None
    if any(mark in source for mark in _WILD):
        # pathlib's glob refuses absolute patterns.
        return [each for each in glob.glob(source, recursive=True) if not Path(each).is_dir()]  # noqa: PTH207
    raise UserError(f"{source}: no such file or folder")


def _find_remote(source: str) -> list[str] | None:
    """The same for a URL."""
    file_system, inside = _remote(source)
    try:
        if any(mark in source.partition("?")[0] for mark in _WILD):
            # Like a shell's pattern, it does not match hidden files.
            paths = [each for each in file_system.glob(inside) if not each.rpartition("/")[2].startswith(".")]
        elif file_name(source).lower().endswith(READ) and file_system.exists(inside):
            return None
        elif _DATASET.fullmatch(source):
            paths = [path for path in file_system.find(inside) if _in_dataset(path.removeprefix(inside).strip("/"))]
        elif file_system.isdir(inside):
            found = {each["name"].rstrip("/"): each["type"] for each in file_system.ls(inside, detail=True)}
            names = {path: path.rpartition("/")[2] for path in found}
            folders = [
                names[path]
                for path, kind in found.items()
                if kind == "directory" and is_visible(names[path]) and _holds_data(file_system.walk(path))
            ]
            paths = [path for path in found if found[path] != "directory" and _wanted(names[path])]
            require_all_read(source, names.values(), folders, _pattern(source.rstrip("/"), paths))
        else:
            # Unlike exists(), it raises if the file system cannot be reached.
            with suppress(FileNotFoundError):
                file_system.info(inside)
                return None
            raise UserError(f"{source}: no such file or folder")
    except UserError:
        raise
    # Each file system has errors of its own.
    except Exception as error:
        raise UserError(f"{source}: {getattr(error, 'strerror', None) or error}") from None
    return [file_system.unstrip_protocol(each) for each in paths]


def _in_dataset(path: str) -> bool:
    """Whether a file of a data set's repository holds rows, by its path there."""
    return all(map(is_visible, path.split("/"))) and _wanted(path.rpartition("/")[2])


def _wanted(name: str) -> bool:
    return name.lower().endswith(READ) and is_visible(name)


def _is_data(name: str) -> bool:
    """Whether a file in an inner folder is rows of a user, rather than the settings of a model."""
    return _wanted(name) or (is_unsupported_data(name) and not name.lower().endswith(".json"))


def _holds_data(walked: Iterable[tuple[str, list[str], list[str]]]) -> bool:
    """Whether a folder has data at any depth, from what ``os.walk`` gives for it. It ends with the first file."""
    for _, folders, names in walked:
        folders[:] = filter(is_visible, folders)
        if any(map(_is_data, names)):
            return True
    return False


def _pattern(folder: str, wanted: Sequence[str]) -> str:
    """A pattern of the files that are read, for messages."""
    first = min(wanted, default=".jsonl").lower()
    return f"'{folder}/*{next((each for each in READ if first.endswith(each)), '.jsonl')}'"


def _real_pattern(pattern: str) -> str:
    """A local pattern with links followed, as far as it names a folder."""
    parts = os.path.abspath(pattern).split("/")  # noqa: PTH100
    wild = next((place for place, part in enumerate(parts) if any(mark in part for mark in _WILD)), len(parts))
    return "/".join([os.path.realpath("/".join(parts[:wild]) or "/").rstrip("/"), *parts[wild:]])


def _matches(parts: list[str], pattern: list[str]) -> bool:
    """Whether a glob matches a path, both split at slashes. Only a part with a leading dot matches hidden names."""
    if not pattern:
        return not parts
    if pattern[0] == "**":
        hidden = next((place for place, part in enumerate(parts) if part.startswith(".")), len(parts))
        return any(_matches(parts[place:], pattern[1:]) for place in range(hidden + 1))
    if not parts or (parts[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    return fnmatch.fnmatchcase(parts[0], pattern[0]) and _matches(parts[1:], pattern[1:])
