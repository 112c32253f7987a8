"""Bytecode of packages, made by other processes than the one that imports them.

A first import compiles one file after the other: PyTorch's 700 take 3 to 5 s. Other cores compile the files that are
still to come. ``python first_bytecode.py OWN COUNT FOLDER...`` compiles each ``COUNT``-th file of these folders, from
number ``OWN`` on, unless it has bytecode.
"""

import fcntl
import os
import py_compile
import subprocess
import sys
from collections.abc import Iterator, Sequence
from importlib.util import cache_from_source, find_spec
from pathlib import Path

# More processes compile files that were imported meanwhile.
_MAX_PROCESSES = 8
_PACKAGES = ("torch", "triton")
# Parts of PyTorch that a start does not import, a half of its files.
_UNUSED = frozenset({"_dynamo", "_export", "_inductor", "distributed", "onnx", "testing"})


def compile_beside(cache: Path) -> list[subprocess.Popen[bytes]]:
    """Begin to fill the cache of bytecode, a folder; returns the processes, which end by themselves.

    Until then they share a lock on the folder: who deletes it waits for them.
    """
    specs = [spec for name in _PACKAGES if (spec := find_spec(name)) is not None]
    folders = [folder for spec in specs for folder in spec.submodule_search_locations or ()]
    count = min(_MAX_PROCESSES, (os.cpu_count() or 1) - 1)
    # Without the environment's and the site's packages, a process begins in 20 ms.
    python = [sys.executable, "-I", "-S", "-X", f"pycache_prefix={cache}", __file__]
    lock = os.open(cache, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
        return [
            subprocess.Popen(
                [*python, str(own), str(count), *folders],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[lock],
            )
            for own in range(count)
        ]
    finally:
        os.close(lock)


def compile_files(own: int, count: int, folders: Sequence[str]) -> None:
    """Compile this process's share; files that cannot be compiled are left to whoever imports them."""
    for number, file in enumerate(_files(folders)):
        if number % count == own and not Path(cache_from_source(file)).exists():
            py_compile.compile(file, quiet=2)


def _files(folders: Sequence[str]) -> Iterator[str]:
    for root in folders:
        for folder, inner, names in os.walk(root):
            inner[:] = sorted(name for name in inner if name not in _UNUSED)
            yield from (os.path.join(folder, name) for name in sorted(names) if name.endswith(".py"))  # noqa: PTH118


if __name__ == "__main__":
    compile_files(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
