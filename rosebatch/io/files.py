"""Files by path or URL. URLs are read and written through fsspec."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, cast

from rosebatch.core.errors import UserError
from rosebatch.host.sparse_file import open_local
from rosebatch.io.formats import TABLES, named

# Of a local file, at once: a line that is too long is read past in such pieces.
READ_BYTES = 1 << 18


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
    file_system, inside = remote(url)
    return str(file_system.unstrip_protocol(inside))


def file_name(path: str) -> str:
    """The last part of a path or URL, without the query of a presigned URL."""
    return (path.partition("?")[0] if is_url(path) else path).rpartition("/")[2]


def is_table(path: str) -> bool:
    """Whether the extension is of a table: Parquet, Arrow or CSV."""
    return named(file_name(path)).kind in TABLES


def open_file(path: str) -> IO[bytes]:
    """Open a file for reading, in binary.

    Raises:
        UserError: it cannot be opened.
    """
    with failing(lambda why: UserError(f"{path}: {why}")):
        if not is_url(path):
            return open_local(Path(path), READ_BYTES)
        file_system, inside = _connected(path)
        return cast(IO[bytes], file_system.open(inside, "rb"))


def digest(paths: Sequence[str], opened: Callable[[str], IO[bytes]] | None = None) -> str:
    """SHA-256 of one file's contents. For several files, SHA-256 of their digests.

    Args:
        paths: of the files.
        opened: opens one of them, in place of ``open_file``.

    Raises:
        UserError: a file cannot be read.
    """
    return joined_digest([digest_of(path, opened or open_file) for path in paths])


def digest_of(path: str, opened: Callable[[str], IO[bytes]]) -> str:
    """SHA-256 of the contents of one file; arguments and errors as of ``digest``."""
    with opened(path) as file:
        try:
            return hashlib.file_digest(cast(Any, file), "sha256").hexdigest()
        except OSError as error:
            raise UserError(f"{path}: {error.strerror or error}") from None


def joined_digest(digests: Sequence[str]) -> str:
    """The digest of files, made of those of each."""
    return digests[0] if len(digests) == 1 else hashlib.sha256(" ".join(digests).encode()).hexdigest()


def upload(path: Path, url: str) -> None:
    """Move a local file to a URL, where it appears whole.

    Raises:
        OSError: the URL cannot be written.
    """
    # Presigned URLs for uploads expect PUT.
    options = {"method": "put"} if url.startswith(("http://", "https://")) else {}
    with failing(OSError):
        file_system, inside = _connected(url)
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
    file_system, inside = remote(url)
    folder = inside.rstrip("/") if url.endswith("/") else inside.rpartition("/")[0]
    # Always the same: the next run deletes what a killed one leaves.
    trial = f"{folder}/.rosebatch-try"
    with failing(lambda why: UserError(f"{url}: cannot be written ({why})")):
        file_system.pipe_file(trial, b"")
    with suppress(Exception):
        file_system.rm_file(trial)


def remove_url(url: str) -> None:
    """Delete the file at a URL, if there is one. HTTP has no deletion.

    Raises:
        OSError: it cannot be deleted.
    """
    if not url.startswith(("http://", "https://")):
        with failing(OSError), suppress(FileNotFoundError):
            file_system, inside = _connected(url)
            file_system.rm_file(inside)


def remote(url: str) -> tuple[Any, str]:
    """The file system of a URL, and the path inside it.

    Raises:
        UserError: the file system is unknown, or cannot be reached.
    """
    with failing(lambda why: UserError(f"{url}: {why}")):
        return _connected(url)


def _connected(url: str) -> tuple[Any, str]:
    from fsspec.core import url_to_fs

    found: tuple[Any, str] = url_to_fs(url)
    return found


@contextmanager
def failing(raised: Callable[[str], Exception]) -> Iterator[None]:
    """Turn whatever a file system raises into an error of ours, made of its reason.

    Each has errors of its own, which share no class but Exception: ``ftplib.Error``, ``EOFError``, those of SSH, SMB,
    HTTP and archives, and ``TypeError`` where a URL lacks what the file system needs.
    """
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        raise raised(getattr(error, "strerror", None) or str(error) or type(error).__name__) from None
