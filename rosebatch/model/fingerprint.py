"""Hashes of a model's files: of all that they hold, or of what changes with them."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rosebatch.core.errors import UserError
from rosebatch.host.file_state import FileState
from rosebatch.model.content_digest import content_digests

_SMALL_FILES = {".json", ".jinja", ".model", ".txt"}


def tokenizer_fingerprint(folder: Path) -> str:
    """Hash of the files of a tokenizer, as ``ModelSource.fingerprint``."""
    return fingerprint_of("tokenizer", small_files(folder))


def small_files(folder: Path) -> list[Path]:
    """The files of shape, tokenizer and chat template."""
    with _naming_files():
        files = [*folder.iterdir(), *(folder / "additional_chat_templates").glob("*")]
        return sorted(path for path in files if path.suffix in _SMALL_FILES and path.is_file())


def fingerprint_of(start: str, files: Sequence[Path]) -> str:
    """Hash of a text, and of every byte of every file.

    Raises:
        UserError: a file is missing or unreadable.
    """
    found = hashlib.sha256(start.encode())
    with _naming_files():
        for path, content in zip(files, content_digests(files), strict=True):
            found.update(b" %s %s" % (os.fsencode(path.name), content.encode()))
    return found.hexdigest()


def state_of(start: str, files: Sequence[Path]) -> str:
    """What changes with the files, found without reading them; arguments as of ``fingerprint_of``."""
    with _naming_files():
        states = [(path.name, *FileState.of(path)) for path in files]
    return hashlib.sha256(repr((start, states)).encode()).hexdigest()


@contextmanager
def _naming_files() -> Iterator[None]:
    """An error of the system is the user's, by the name of the file."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{error.filename}: {error.strerror}") from None
