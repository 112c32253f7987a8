"""A process that ends a Ray which another process started, once that process is gone, however it ended.

Of itself, Ray's agents outlive a killed process by a minute: they wait for the GCS, to report the end of the raylet.

``python ray_guard.py MARK`` waits for the end of its stdin. Then it ends all processes with this entry in their
environment, and those below them. Linux only: elsewhere Ray is left to itself.
"""

import os
import select
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

# Between two looks at the processes of a Ray that starts.
_LOOK_SECONDS = 0.3
# Processes that end may start others meanwhile, and on a busy machine the end takes long: a minute at most.
_ROUNDS = 1200
_PAUSE_SECONDS = 0.05
# How long whoever started Ray waits for that.
_END_SECONDS = 5.0


class RayGuard:
    """The process, seen from the one that starts Ray.

    Args:
        mark: an entry ``NAME=VALUE`` of the environment of all processes of this Ray, and of no other process.
    """

    def __init__(self, mark: str) -> None:
        # Without the environment's and the site's packages it begins in 20 ms. Its session gets no Ctrl-C.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, mark],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        self._pipe = self._process.stdin

    def is_up(self) -> None:
        """Say that all processes of Ray have started."""
        with suppress(OSError):
            os.write(self._pipe.fileno(), b".")

    def end(self) -> None:
        """End Ray and this process."""
        self._pipe.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_SECONDS)


def processes(mark: bytes) -> set[tuple[int, bytes]]:
    """Processes with an entry in their environment, and those below them: some overwrite theirs.

    Returns:
        the id and the start of each: ids come again.
    """
    parents: dict[int, int] = {}
    starts: dict[int, bytes] = {}
    marked: set[int] = set()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            pid, fields = int(folder.name), (folder / "stat").read_bytes().rpartition(b")")[2].split()
            if fields[0] != b"Z":
                parents[pid], starts[pid] = int(fields[1]), fields[19]
            if mark in (folder / "environ").read_bytes().split(b"\0"):
                marked.add(pid)
    while below := {pid for pid, parent in parents.items() if parent in marked} - marked:
        marked |= below
    return {(pid, starts[pid]) for pid in marked & parents.keys()}


def end_all(mark: bytes, known: set[tuple[int, bytes]]) -> None:
    """End processes that are known or have the mark, and those that they start meanwhile."""
    for _ in range(_ROUNDS):
        left = processes(mark) | {each for each in known if is_there(each)}
        if not left:
            return
        for pid, _ in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_SECONDS)


def is_there(process: tuple[int, bytes]) -> bool:
    """Whether it still runs."""
    with suppress(OSError):
        fields = Path(f"/proc/{process[0]}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0] != b"Z" and fields[19] == process[1]
    return False


def guard(mark: bytes) -> None:
    """Look at the processes until all have started, then wait for the end of stdin, and end them."""
    known: set[tuple[int, bytes]] = set()
    while not select.select([0], [], [], _LOOK_SECONDS)[0]:
        known |= processes(mark)
    while os.read(0, 1):
        known |= processes(mark)
    end_all(mark, known)


if __name__ == "__main__":
    guard(sys.argv[1].encode())
