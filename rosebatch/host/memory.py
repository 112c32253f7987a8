"""The memory of this machine, as far as this process may use it."""

import ctypes
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

# Of a group of processes: its limit, what it uses, and what of that are pages of files, which make room.
_V2 = "memory.max", "memory.current", ("inactive_file", "active_file")
_V1 = "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")


class HostMemory(NamedTuple):
    """Bytes: free, the cache of files included, and all."""

    free: int
    total: int


def host_memory(root: Path = Path("/")) -> HostMemory:
    """What the machine has, or the groups of this process (containers, Slurm) where they allow less.

    Args:
        root: of the file system.
    """
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        sizes = {name: int(value.split()[0]) << 10 for name, _, value in (line.partition(":") for line in lines)}
        found = HostMemory(sizes["MemAvailable"], sizes["MemTotal"])
    except (OSError, KeyError):
        # Not Linux: nothing says what is free.
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return HostMemory(total, total)
    groups = [found, *_groups(root)]
    return HostMemory(min(each.free for each in groups), min(each.total for each in groups))


def give_back() -> None:
    """Give the system what the C library keeps of freed memory, in all places of its heaps.

    Large blocks come from these once blocks of their size were freed. Then rows of 30 MB leave holes that no later one
    fits into. Takes some milliseconds; does nothing where the library is not glibc.
    """
    if (trim := _trim()) is not None:
        trim(0)


@cache
def _trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


def _groups(root: Path) -> Iterator[HostMemory]:
    """The control groups of this process that limit memory, version 1 or 2, and those around them."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in memberships:
        _, kinds, path = line.split(":", 2)
        if kinds not in ("", "memory"):
            continue
        mount, names = (root / "sys/fs/cgroup", _V2) if not kinds else (root / "sys/fs/cgroup/memory", _V1)
        folder = mount / path.lstrip("/")
        # In a container the path may be the host's, and its own group lies at the mount.
        for each in (folder, *folder.parents):
            if (group := _group(each, *names)) is not None:
                yield group
            if each == mount:
                break


def _group(folder: Path, limit: str, usage: str, cached: tuple[str, str]) -> HostMemory | None:
    """A group's memory; None if it has no limit."""
    try:
        total = int((folder / limit).read_text())
        used = int((folder / usage).read_text())
        lines = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used -= sum(int(value) for name, value in lines if name in cached)
    except (OSError, ValueError):
        return None
    return HostMemory(max(total - used, 0), total)
