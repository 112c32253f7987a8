"""Opens a file that one process at a time may hold."""

import errno
import fcntl
import os
from pathlib import Path
from stat import S_ISREG

from rosebatch.core.errors import UserError

_LINK = "is a link; delete it or choose another output"


def open_locked(path: Path, flags: int = 0) -> int | None:
    """A descriptor with a lock, so that no other process holds the file. None if there is no file to open.

    Raises:
        UserError: it cannot be opened, another process holds it, or it is no regular file.
    """
    while True:
        try:
            # A link is not followed. A FIFO or device must not block.
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | flags, 0o666)
        except FileNotFoundError as error:
            if not flags:
                return None
            raise UserError(f"{path}: {error.strerror}") from None
        except OSError as error:
            raise UserError(f"{path}: {_LINK if error.errno == errno.ELOOP else error.strerror}") from None
        try:
            if not S_ISREG(os.fstat(descriptor).st_mode):
                raise UserError(f"{path}: is no regular file; delete it or choose another output")
            _lock(descriptor, path)
            # Another process may have deleted or replaced the file before the lock was ours.
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{path}: another run is writing to it; wait for it or choose another output") from None
    except OSError:
        # The file system has no locks.
        pass
