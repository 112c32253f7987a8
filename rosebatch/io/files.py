"""Files by path or URL: local ones as they are, those of other systems through fsspec."""

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
    """Whether it names a file system beside the file, such as ``s3://``."""
    return "://" in path


def file_name(path: str) -> str:
    """The last part of a path or URL, without a query such as that of a presigned URL."""
    return (path.partition("?")[0] if is_url(path) else path).rpartition("/")[2]


def is_parquet(path: str) -> bool:
    """By the extension."""
    return file_name(path).lower().endswith(PARQUET_SUFFIXES)


def find_files(source: str) -> list[str]:
    """The files that a source names: itself, those of a folder, or those that a glob fits, in the order of their names.

    Raises:
        UserError: there are none, or a folder holds both kinds.
    """
    paths = _find_remote(source) if is_url(source) else _find_local(source)
    if paths is None:
        return [source]
    if not paths:
        raise UserError(f"{source}: no .parquet or .jsonl file there")
    if len({is_parquet(path) for path in paths}) > 1:
        raise UserError(
            f"{source}: holds Parquet and JSONL files; name one kind, such as {source.rstrip('/')}/*.parquet"
        )
    return sorted(paths)


def open_file(path: str) -> IO[bytes]:
    """A file to read, at its beginning.

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
    """SHA-256 of one file's contents, or of the digests of several."""
    found = []
    for path in paths:
        with open_file(path) as file:
            found.append(hashlib.file_digest(cast(Any, file), "sha256").hexdigest())
    return found[0] if len(found) == 1 else hashlib.sha256(" ".join(found).encode()).hexdigest()


def upload(path: Path, url: str) -> None:
    """Move a local file to a URL, where it appears whole.

    Raises:
        OSError: it cannot be written there.
    """
    file_system, inside = _remote(url)
    # What presigned URLs are for.
    options = {"method": "put"} if url.startswith(("http://", "https://")) else {}
    file_system.put_file(str(path), inside, **options)
    path.unlink()


def _remote(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    try:
        file_system, inside = url_to_fs(url)
    except (ImportError, ValueError) as error:
        raise UserError(f"{url}: {error}") from None
    return file_system, inside


def _find_local(source: str) -> list[str] | None:
    """None where the source is a file itself."""
    path = Path(source)
    if path.is_file() or source == "-":
        return None
    if path.is_dir():
        return [str(each) for each in path.iterdir() if _wanted(each.name)]
    if any(mark in source for mark in _WILD):
        # pathlib's knows no absolute patterns.
        return [each for each in glob.glob(source, recursive=True) if Path(each).is_file()]  # noqa: PTH207
    if path.exists():
        return None
    raise UserError(f"{source}: no such file")


def _find_remote(source: str) -> list[str] | None:
    file_system, inside = _remote(source)
    try:
        if any(mark in source.partition("?")[0] for mark in _WILD):
            # As a shell's, which does not find what is hidden.
            found = [each for each in file_system.glob(inside) if not each.rpartition("/")[2].startswith(".")]
        elif file_name(source).lower().endswith(_SUFFIXES) and file_system.exists(inside):
            return None
        elif file_system.isdir(inside):
            found = [each for each in file_system.ls(inside, detail=False) if _wanted(each.rpartition("/")[2])]
        elif file_system.exists(inside):
            return None
        else:
            raise UserError(f"{source}: no such file")
    except OSError as error:
        raise UserError(f"{source}: {error.strerror or error}") from None
    return [file_system.unstrip_protocol(each) for each in found]


def _wanted(name: str) -> bool:
    return name.lower().endswith(_SUFFIXES) and not name.startswith((".", "_"))
