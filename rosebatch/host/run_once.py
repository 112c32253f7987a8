"""Work that one of many processes does for all: it goes first, and the others find what it made."""

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

# After that time the others work for themselves: the first one may hang.
_MAX_SECONDS = 300.0
_PATIENCE_SECONDS = 0.05


@contextmanager
def run_once(path: Path, max_seconds: float = _MAX_SECONDS) -> Iterator[None]:
    """Let the first process that comes go alone, and all others together once it has left.

    The system releases the lock of a process that dies. Where files cannot be locked, nobody waits.

    Args:
        path: of the file that is locked; it is made.
        max_seconds: after which the others do not wait any longer.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("a")
    except OSError:
        yield
        return
    with file:
        if not _lock(file.fileno(), fcntl.LOCK_EX):
            until = time.monotonic() + max_seconds
            # A shared lock: those that waited hold it together, and none of them is a first one.
            while not _lock(file.fileno(), fcntl.LOCK_SH) and time.monotonic() < until:
                time.sleep(_PATIENCE_SECONDS)
        yield


def _lock(descriptor: int, kind: int) -> bool:
    """Whether the file is locked now, without waiting; True where files cannot be locked."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True
