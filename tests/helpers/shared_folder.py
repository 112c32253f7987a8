"""What one of the forks that run tests makes for all of them: models and references that take long."""

import fcntl
import shutil
from collections.abc import Callable
from pathlib import Path


def make_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """Make a folder unless it is there; whoever comes meanwhile waits.

    Args:
        folder: its name is that of one thing, in a folder that all forks have.
        make: fills a folder that is there and empty. What it leaves when it fails is no folder of that name.

    Returns:
        the folder, which nobody may change.
    """
    with folder.with_name(f"{folder.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            begun = folder.with_name(f"{folder.name}.begun")
            # Of a fork that died.
            shutil.rmtree(begun, ignore_errors=True)
            begun.mkdir()
            make(begun)
            begun.rename(folder)
    return folder
