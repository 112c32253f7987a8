"""Files below the media root. Where a path leads is found first; then it is opened by a way that has no links."""

import os
import stat
from pathlib import Path

from rosebatch.core.errors import RowError
from rosebatch.io.images.policy import MediaPolicy

_FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECTORY
# Without waiting, for a FIFO may have no writer.
_FILE = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY


def read_local(path: str, policy: MediaPolicy) -> bytes:
    """A regular file's bytes.

    Args:
        path: absolute, or below the root. Links are followed, as long as they lead to a place below the root.
        policy: with the root, and the most bytes.

    Raises:
        RowError: ``image_not_allowed``, ``image_not_read`` or ``image_too_large``.
    """
    if policy.root is None:
        told = "files are read below --media-root alone (media_root of the library), and there is none"
        raise RowError("image_not_allowed", told)
    try:
        descriptor = _open_below(policy.root, path, policy.root_name)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise RowError("image_not_allowed", "it is no regular file")
            policy.require_size(status.st_size)
            with os.fdopen(descriptor, "rb", closefd=False) as file:
                # A file that grows meanwhile is cut.
                return file.read(status.st_size)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RowError("image_not_read", f"the file cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise RowError("invalid_image", f"the path is broken: {error}") from None


def _open_below(root: Path, path: str, shown: str) -> int:
    """A descriptor of what the path leads to.

    A link that appears on the way after the path was resolved is an error: no component is followed.

    Args:
        root: the folder.
        path: absolute, or below it.
        shown: the folder in messages.

    Raises:
        RowError: it leads out of the root.
    """
    base = os.path.realpath(root)
    target = os.path.realpath(os.path.join(base, path))  # noqa: PTH118
    if os.path.commonpath((base, target)) != base:
        raise RowError("image_not_allowed", f"the path leads out of {shown}")
    *folders, name = Path(target).relative_to(base).parts or (".",)
    at = os.open(base, _FOLDER)
    try:
        for folder in folders:
            below = os.open(folder, _FOLDER, dir_fd=at)
            os.close(at)
            at = below
        return os.open(name, _FILE, dir_fd=at)
    finally:
        os.close(at)
