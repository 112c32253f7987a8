"""A local Ray for commands that tests run, and what is left of it."""

import contextlib
import importlib.util
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli import conftest as of_cli
from tests.cli import test_workers as of_workers
from tests.helpers.checkout import python_path
from tests.helpers.waiting import until

cli, model_folder = of_cli.cli, of_cli.model_folder
source, expected, start = of_workers.source, of_workers.expected, of_workers.start


@pytest.fixture
def rays(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator["Rays"]:
    """Ray for the commands of a test. No actor may be left afterwards."""
    if importlib.util.find_spec("ray") is None:
        pytest.skip("ray is not installed: pip install 'rosebatch[ray]'")
    # Ray's sockets are in it, and their paths must be short.
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("PYTHONPATH", python_path())
    found = Rays(folder, tmp_path)
    try:
        yield found
        until(lambda: not found.processes("ray::WorkerActor"))
    finally:
        # Agents of a Ray whose driver was killed take minutes to see that.
        for pid in found.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(folder, ignore_errors=True)


class Rays:
    """The processes of the jobs of a test, and of their Ray.

    Args:
        folder: of Ray's files.
        place: the working folder of the jobs. Actors overwrite their environment, but keep this.
    """

    def __init__(self, folder: str, place: Path) -> None:
        self._mark = f"RAY_TMPDIR={folder}".encode()
        self._place = place

    def processes(self, name: str = "") -> list[int]:
        """Those that run; an actor's is called ``ray::CLASS``. Jobs have sessions of their own, unlike this process."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                pid, command = int(folder.name), (folder / "cmdline").read_bytes()
                is_ours = self._mark in (folder / "environ").read_bytes().split(b"\0")
                is_ours |= (folder / "cwd").readlink().is_relative_to(self._place)
                if is_ours and command and command.startswith(name.encode()) and os.getsid(pid) != os.getsid(0):
                    found.append(pid)
            except OSError:
                continue
        return found
