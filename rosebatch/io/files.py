"""Files by path or URL. URLs are read and written through fsspec."""

import glob
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, cast

from rosebatch.errors import UserError

PARQUET_SUFFIXES = (".parquet", ".pq")
_SUFFIXES = (*PARQUET_SUFFIXES, ".jsonl")
_WILD = "*?["


def is_url(path: str) -> bool:
    """Whether a path names a file system and a file in it, as ``s3://`` URLs do."""
    return "://" in path


def file_name(path: str) -> str:
    """The last part of a path or URL, without the query of a presigned URL."""
    return (path.partition("?")[0] if is_url(path) else path).rpartition("/")[2]


def is_parquet(path: str) -> bool:
    """Whether the extension says Parquet."""
    return file_name(path).lower().endswith(PARQUET_SUFFIXES)


def find_files(source: str) -> list[str]:
    """The files of a source, in the order of their names.

    Args:
        source: a path or URL of a file, a folder or a glob; ``-`` for stdin. A folder stands for the JSONL or Parquet
            files in it, without those whose names begin with ``.`` or ``_``.

    Raises:
        UserError: there are no files, they are of both kinds, or the source is a named pipe.
    """
    paths = _find_remote(source) if is_url(source) else _find_local(source)
    if paths is None:
        return [source]
    if not paths:
        raise UserError(f"{source}: no files found; a folder needs .jsonl or .parquet files, a pattern must match some")
    if len({is_parquet(path) for path in paths}) > 1:
        raise UserError(f"{source}: has both Parquet and JSONL files; choose one kind by a pattern such as *.parquet")
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
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: {getattr(error, 'strerror', None) or error}") from None


def digest(paths: Sequence[str]) -> str:
    """SHA-256 of one file's contents. For several files, SHA-256 of their digests.

    Raises:
        UserError: a file cannot be read.
    """
    digests = []
    for path in paths:
        with open_file(path) as file:
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


def _remote(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path inside it."""
    from fsspec.core import url_to_fs

    try:
        file_system, inside = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UserError(f"{url}: {error}") from None
    return file_system, inside


def _find_local(source: str) -> list[str] | None:
    """The files that a path names; None if the source is itself a file."""
    path = Path(source)
    if path.is_file() or source == "-":
        return None
    if path.is_dir():
        return [str(each) for each in path.iterdir() if _wanted(each.name)]
    if any(mark in source for mark in _WILD):
        # pathlib's glob refuses absolute patterns.
        return [each for each in glob.glob(source, recursive=True) if Path(each).is_file()]  # noqa: PTH207
    if path.is_fifo():
        # The input is opened more than once, and what one reader takes from a pipe is lost to the next.
        raise UserError(f"{source}: is a pipe; send it to stdin and give - as the input")
    if path.exists():
        return None
    raise UserError(f"{source}: no such file or folder")


def _find_remote(source: str) -> list[str] | None:
    """The same for a URL."""
    file_system, inside = _remote(source)
    try:
        if any(mark in source.partition("?")[0] for mark in _WILD):
            # Like a shell's pattern, it does not match hidden files.
            paths = [each for each in file_system.glob(inside) if not each.rpartition("/")[2].startswith(".")]
        elif file_name(source).lower().endswith(_SUFFIXES) and file_system.exists(inside):
            return None
        elif file_system.isdir(inside):
            paths = [each for each in file_system.ls(inside, detail=False) if _wanted(each.rpartition("/")[2])]
        elif file_system.exists(inside):
            return None
        else:
            raise UserError(f"{source}: no such file or folder")
    except OSError as error:
        raise UserError(f"{source}: {error.strerror or error}") from None
    return [file_system.unstrip_protocol(each) for each in paths]


def _wanted(name: str) -> bool:
    return name.lower().endswith(_SUFFIXES) and not name.startswith((".", "_"))
