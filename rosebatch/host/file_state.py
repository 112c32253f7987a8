"""Whether a local file still has the contents that were read, without reading it again."""

import os
import time
from pathlib import Path
from typing import NamedTuple

# The coarsest clock of a file system (FAT). Two changes within one tick leave the same times.
_TICK_NS = 2 * 10**9


class FileState(NamedTuple):
    """What changes with a file's contents. The system sets ``ctime_ns`` at each write; programs cannot set it back."""

    device: int
    inode: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, file: Path | int) -> "FileState":
        """The state of a file, links followed, or of a descriptor.

        Raises:
            OSError: there is no such file.
        """
        status = os.fstat(file) if isinstance(file, int) else file.stat()
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns)

    @property
    def settled(self) -> bool:
        """Whether every change from now on gives another state: the last change is more than a tick ago."""
        return time.time_ns() - self.ctime_ns > _TICK_NS
