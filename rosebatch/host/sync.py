"""Waiting for the disk."""

import errno
import os
from pathlib import Path


def sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk.

    Raises:
        OSError: they cannot be written.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some file systems cannot do this for a folder.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
