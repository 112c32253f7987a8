"""The memory that a process may use: the machine's, or its control groups'."""

import ctypes
import sys
from pathlib import Path

import pytest

from rosebatch.host.memory import give_back, host_memory
from tests.helpers.forks import in_fork

MIB = 1 << 20
# Options of ``mallopt``.
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_HOLE = 8 * MIB
MEMINFO = "MemTotal:       8388608 kB\nMemFree:          1024 kB\nMemAvailable:   4194304 kB\n"


def machine(root, files):
    """A file system with these files."""
    for name, text in {"proc/meminfo": MEMINFO, **files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return host_memory(root)


def group(folder, limit, used, *, v1=False):
    """The files of a control group, MiB; 100 of what it uses are pages of files."""
    limit_name, used_name = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes") if v1 else ("memory.max", "memory.current")
    )
    prefix = "total_" if v1 else ""
    return {
        f"sys/fs/cgroup/{folder}/{limit_name}": f"{limit * MIB if isinstance(limit, int) else limit}\n",
        f"sys/fs/cgroup/{folder}/{used_name}": f"{used * MIB}\n",
        f"sys/fs/cgroup/{folder}/memory.stat": (
            f"anon 5\n{prefix}inactive_file {60 * MIB}\n{prefix}active_file {40 * MIB}\n"
        ),
    }


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, (4096, 8192)),
        ({"proc/self/cgroup": "0::/job\n", **group("job", 1000, 300)}, (800, 1000)),
        ({"proc/self/cgroup": "0::/job/step\n", **group("job/step", "max", 5), **group("job", 1000, 300)}, (800, 1000)),
        ({"proc/self/cgroup": "0::/\n", **group("", 1000, 300)}, (800, 1000)),
        ({"proc/self/cgroup": "0::/of/the/host\n", **group("", 1000, 300)}, (800, 1000)),
        ({"proc/self/cgroup": "0::/job\n", **group("job", 9000, 300)}, (4096, 8192)),
        ({"proc/self/cgroup": "0::/job\n", **group("job", 1000, 2000)}, (0, 1000)),
        ({"proc/self/cgroup": "4:memory:/a\n0::/\n", **group("memory/a", 1000, 300, v1=True)}, (800, 1000)),
        ({"proc/self/cgroup": "4:memory:/gone\n", **group("memory", 1000, 300, v1=True)}, (800, 1000)),
        ({"proc/self/cgroup": "4:memory:/a\n", **group("memory/a", (1 << 43) - 1, 300, v1=True)}, (4096, 8192)),
        ({"proc/self/cgroup": "4:cpu:/a\n", **group("cpu/a", 1000, 300)}, (4096, 8192)),
    ],
    ids=["none", "v2", "parent", "namespace", "foreign path", "wide", "full", "v1", "v1 mount", "v1 none", "other"],
)  # fmt: skip
def test_free_and_all_memory(tmp_path, files, expected):
    """Free pages alone left out the cache of files; a container's limit was not read, and the process was killed."""
    assert machine(tmp_path, files) == tuple(size * MIB for size in expected)


def _with_holes():
    """MiB of this process with 20 blocks that are free, each before one that is not; and once they are given back."""
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    # By itself, glibc goes by what was freed before: whether such blocks are pages of their own, and whether free ones
    # at the heap's end stay. A small block between two of these could lie in an older hole.
    assert libc.mallopt(_MMAP_THRESHOLD, 2 * _HOLE) and libc.mallopt(_TRIM_THRESHOLD, 1 << 30)
    blocks = [libc.malloc(_HOLE) for _ in range(40)]
    for block in blocks[::2]:
        ctypes.memset(block, 1, _HOLE)
        libc.free(block)
    before = _resident()
    give_back()
    return before, _resident()


def _resident():
    # Pages are counted here; each processor has its own part of the number in ``statm``, which lags.
    lines = Path("/proc/self/smaps").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Rss:")) // 1024


@pytest.mark.skipif(
    not sys.platform.startswith("linux") or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="glibc"
)
def test_holes_between_blocks_are_given_back():
    """Of rows of 30 MB that were gone, 90 MiB stayed with the process."""
    before, after = in_fork(_with_holes)
    # The first and last page of a block stay.
    assert before - after >= 20 * (_HOLE // MIB) - 2
