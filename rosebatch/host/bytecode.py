"""Python's bytecode of PyTorch in our own cache, where the installation has none.

Some installers leave bytecode to the first import, which compiles a thousand files one after the other. Container
images often keep Python from writing it, and then each start compiles them: ``import torch, triton`` took 3.7 s on such
a host, and 1.8 s with their bytecode.
"""

import fcntl
import os
import shutil
import sys
from contextlib import suppress
from importlib.util import cache_from_source, find_spec
from pathlib import Path

from rosebatch.host.cache_folder import cache_folder

# Set to 0, it leaves Python as it is.
SWITCH = "ROSEBATCH_BYTECODE_CACHE"
# The package that takes longest.
_PACKAGE = "torch"


def keep_bytecode() -> None:
    """Let this process and its children find bytecode in the cache, and write it there, if there is none elsewhere.

    Python does the rest: it compares each file with its source, and processes may write at the same time.
    """
    if sys.pycache_prefix is not None or os.environ.get(SWITCH) == "0" or _has_bytecode():
        return
    folder = bytecode_folder()
    try:
        is_first = not folder.exists()
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError:
        return
    if not os.access(folder, os.W_OK):
        return
    if is_first:
        # Not above: later starts need none of its imports.
        from rosebatch.host.first_bytecode import compile_beside

        # No process may be had; the import then compiles all of it.
        with suppress(OSError):
            compile_beside(folder)
    sys.pycache_prefix, sys.dont_write_bytecode = str(folder), False
    os.environ["PYTHONPYCACHEPREFIX"] = str(folder)
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)


def bytecode_folder() -> Path:
    """The folder of the cache; it may not exist."""
    return cache_folder("bytecode")


def bytecode_bytes() -> int:
    """Size of the cache."""
    return sum(file.stat().st_size for file in bytecode_folder().rglob("*.pyc"))


def clear_bytecode() -> int:
    """Delete the cache, once no process fills it any more; returns the bytes freed."""
    folder = bytecode_folder()
    with suppress(OSError):
        lock = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
        finally:
            os.close(lock)
    freed = bytecode_bytes()
    shutil.rmtree(folder, ignore_errors=True)
    return freed


def _has_bytecode() -> bool:
    """Whether Python finds bytecode of PyTorch; also without PyTorch."""
    found = find_spec(_PACKAGE)
    return found is None or found.origin is None or Path(cache_from_source(found.origin)).exists()
