"""The files of a model folder. They may hold anything: what cannot be used is refused with one line."""

import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rosebatch.core.errors import UserError, is_failure, printable

# Forms of tokenizers that are read, the first by ourselves.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
# Characters of a reason, and of a name within a reason.
_REASON = 200
_NAME = 60
# No config or template is longer. A tokenizer may have a million tokens.
_MAX_TEXT = 1 << 30
# Of a clone without Git LFS, files that are some 130 bytes.
_POINTER, _MAX_POINTER = b"version https://git-lfs", 1024


def refusal(place: object, reason: object) -> UserError:
    """The error of a file: one line of printable characters, which names the file.

    Args:
        place: the file, and what of it.
        reason: a message or an exception, cut where it is long.
    """
    return UserError(f"{printable(str(place))}: {_cut(printable(_text(reason)), _REASON)}")


def shown(value: object) -> str:
    """A value of a file within a message."""
    return _cut(printable(repr(value[:_NAME]) if isinstance(value, str) else repr(value)), _NAME)


def require_file(path: Path) -> None:
    """Check that a path leads to a regular file with contents: to open a pipe would wait for ever.

    Raises:
        UserError: there is none, or a pointer of Git LFS in its place.
    """
    try:
        state = path.stat()
        is_file = stat.S_ISREG(state.st_mode)
        # Also a large one is opened: libraries call a file without permission a missing one.
        is_pointer = is_file and _begins(path, _POINTER) and state.st_size < _MAX_POINTER
    except FileNotFoundError:
        raise refusal(path, "no such file") from None
    except (OSError, ValueError) as error:
        raise refusal(path, error) from None
    if not is_file:
        raise refusal(path, "not a regular file")
    if is_pointer:
        raise refusal(path, "a pointer of Git LFS: git lfs pull brings the file itself")


def _begins(path: Path, head: bytes) -> bool:
    with path.open("rb") as file:
        return file.read(len(head)) == head


def read_text(path: Path) -> str:
    """A file as text.

    Raises:
        UserError: it is missing, unreadable, too long or not UTF-8.
    """
    require_file(path)
    try:
        if path.stat().st_size > _MAX_TEXT:
            raise refusal(path, f"longer than {_MAX_TEXT} bytes")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeError) as error:
        raise refusal(path, error) from None


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file.

    Raises:
        UserError: the file is missing, unreadable, or not a JSON object.
    """
    text = read_text(path)
    try:
        values = json.loads(text)
    except RecursionError:
        raise refusal(path, "nested too deeply") from None
    except ValueError as error:
        raise refusal(path, f"no JSON: {error}") from None
    if not isinstance(values, dict):
        raise refusal(path, "not a JSON object")
    return values


@contextmanager
def reachable(place: object) -> Iterator[None]:
    """Turn the system's errors, such as of a folder without permission, into a ``refusal``. Files have their own."""
    try:
        yield
    except OSError as error:
        raise refusal(error.filename or place, error) from None


@contextmanager
def refused(place: object, what: str) -> Iterator[None]:
    """Turn whatever a library raises for a broken file into a ``refusal``.

    Args:
        place: the file.
        what: the file should have been.
    """
    try:
        yield
    except UserError:
        raise
    except BaseException as error:
        if not is_failure(error):
            raise
        raise refusal(place, f"{what} ({_text(error)})") from None


def _text(reason: object) -> str:
    """One line. An error of the system says only what is wrong: its path would be named twice."""
    text = reason.strerror if isinstance(reason, OSError) and reason.strerror else str(reason)
    # Cut first: escaping something huge takes long.
    return " ".join(text[: 4 * _REASON].split()) or type(reason).__name__


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."
