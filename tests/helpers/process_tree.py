"""The processes below one, and the processor time that they have taken. Looks into /proc."""

import os
import signal
import subprocess
import time
from collections import defaultdict
from contextlib import suppress
from pathlib import Path
from typing import Any


def tree(pid: int) -> dict[int, float]:
    """Seconds of a process, and of each below it, with those of their children that have ended."""
    ticks, below = {}, defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # It has ended.
            fields = path.read_text().rpartition(")")[2].split()
            ticks[int(path.parent.name)] = sum(map(int, fields[11:15]))
            below[int(fields[1])].append(int(path.parent.name))
    found, left = {}, [pid]
    while left:
        each = left.pop()
        if each in ticks:
            found[each] = ticks[each] / os.sysconf("SC_CLK_TCK")
        left += below[each]
    return found


def running_seconds(pid: int) -> float:
    """The processor time of a process that runs, and of those below it."""
    return sum(tree(pid).values())


def catches_interrupts(pid: int) -> bool:
    """Whether a process handles SIGINT itself."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    mask = next((line.split()[1] for line in lines if line.startswith("SigCgt")), "0")
    return bool(int(mask, 16) >> (signal.SIGINT - 1) & 1)


def await_start(process: "subprocess.Popen[Any]") -> None:
    """Wait until the interpreter's own start is over: there, SIGINT prints a traceback of Python itself.

    Python catches SIGINT from early on; then the command leaves it to the system again. The first library comes after
    that: on a busy machine, nobody may have looked in between.
    """
    maps, has_caught = Path(f"/proc/{process.pid}/maps"), False
    while process.poll() is None:
        catches = catches_interrupts(process.pid)
        if (has_caught and not catches) or "/msgspec/" in maps.read_text():
            return
        has_caught = has_caught or catches
        time.sleep(0.0005)


def command(pid: int) -> str:
    """The arguments of a process; empty once it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def of_job(mark: str, folder: Path) -> list[int]:
    """Processes that a job has left: those with an entry of the environment, or a working folder below this one."""
    found = []
    for each in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            is_ours = mark.encode() in (each / "environ").read_bytes().split(b"\0")
            # Some overwrite their environment.
            is_ours |= (each / "cwd").readlink().is_relative_to(folder)
            if is_ours and (each / "cmdline").read_bytes():
                found.append(int(each.name))
    return found
