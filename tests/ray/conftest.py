"""A local Ray for commands that tests run, and what is left of it."""

import importlib.util
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli import conftest as of_cli
from tests.cli import test_workers as of_workers

cli, model_folder, one_thread = of_cli.cli, of_cli.model_folder, of_cli.one_thread
source, expected, start = of_workers.source, of_workers.expected, of_workers.start
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def rays(monkeypatch: pytest.MonkeyPatch) -> Iterator["Rays"]:
    """Ray for the commands of a test. None of its processes may be left afterwards."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'rosebatch[ray]'")
    # Ray's sockets are in it, and their paths must be short.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(ROOT / "kernels")]))
    found = Rays(folder)
    try:
        yield found
        until(lambda: not found.processes())
    finally:
        for pid in found.processes():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


class Rays:
    """The processes of the Ray whose files are in a folder."""

    def __init__(self, folder: str) -> None:
        self._mark = f"RAY_TMPDIR={folder}".encode()

    def processes(self, name: str = "") -> list[int]:
        """Those that run, this one apart; those of actors of a class are called ``ray::CLASS``."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                is_ours = self._mark in (folder / "environ").read_bytes().split(b"\0")
                if is_ours and (command := (folder / "cmdline").read_bytes()) and command.startswith(name.encode()):
                    found.append(int(folder.name))
            except OSError:
                continue
        return [pid for pid in found if pid != os.getpid()]


def until(done: Callable[[], Any], seconds: float = 60) -> None:
    """Wait until something is so."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.1)
