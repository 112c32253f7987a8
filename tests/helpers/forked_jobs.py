"""The command line as a fork of a process that has imported everything, and its workers as forks of it.

An interpreter takes 2 s of processor time to import PyTorch, and a job has several of them. What differs from a job of
interpreters: nothing is left to import. Tests of imports and of signals during them start interpreters.
"""

import atexit
import ctypes
import importlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from rosebatch.host import child_process
from tests.helpers.forks import FORKS


class ForkedJob:
    """``python -m rosebatch`` as a fork, with the methods of a ``Popen``.

    Args:
        arguments: of the command.
        environment: all variables of the process.
        folder: where it works. It writes ``stderr`` there, and gets a session of its own.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        # It is there as soon as the job is, as behind a redirection.
        Path(folder, "stderr").touch()
        self._process = FORKS.Process(target=_run, args=(arguments, dict(environment), str(folder)))
        self._process.start()
        self.pid: int = self._process.pid or 0

    @property
    def returncode(self) -> int | None:
        """A signal is a negative number."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """The exit code of a process that has ended."""
        return self._process.exitcode

    def wait(self, seconds: float | None = None) -> int:
        """The exit code."""
        self._process.join(seconds)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("rosebatch", seconds or 0.0)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Send it to the process, which must be there."""
        os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask the process to end."""
        self._process.terminate()

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()


class _ForkedPopen(subprocess.Popen):  # type: ignore[type-arg]
    """Starts a child of ``ChildProcess`` as a fork; all else is as ever."""

    def _execute_child(self, args: Any, *options: Any) -> None:
        pass_fds, environment, pipes = options[3], options[5], options[9:15]
        read, _, _, write, _, errors = pipes
        self.pid = os.fork()
        if not self.pid:
            _run_child(args, environment, (read, write, 2 if errors == -1 else errors), *pass_fds)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]


def _run(arguments: Sequence[str], environment: dict[str, str], folder: str) -> None:
    """In a fork of the fork server."""
    os.setsid()
    os.chdir(folder)
    for number, name in enumerate((os.devnull, os.devnull, "stderr")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    setattr(child_process, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": _ForkedPopen}))  # noqa: B010
    _begin([sys.executable, "-m", "rosebatch", *arguments], ["rosebatch", *arguments], environment)
    try:
        runpy.run_module("rosebatch", run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def _run_child(command: Sequence[str], environment: dict[str, str], streams: Sequence[int], link: int) -> NoReturn:
    """In a fork of a job. No thread of the job goes on here, and what the job has open is closed."""
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
        os.closerange(3, link)
        os.closerange(link + 1, os.sysconf("SC_OPEN_MAX"))
        *_, module = command
        _begin(command, ["-c", *command[3:]], environment)
        importlib.import_module(module).main()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _begin(command: Sequence[str], argv: Sequence[str], environment: dict[str, str]) -> None:
    """Look like an interpreter that has just started."""
    if sys.platform == "linux":
        _show_command(command)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    sys.orig_argv[:], sys.argv[:] = command, argv
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE}:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(int(environment["OMP_NUM_THREADS"]))
    for folder in environment["PYTHONPATH"].split(os.pathsep):
        if (module := Path(folder) / "sitecustomize.py").exists():
            runpy.run_path(str(module))


def _show_command(command: Sequence[str]) -> None:
    """For ``ps``: over the arguments that the fork server was started with. The last one of a long command counts."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    shown = "\0".join([command[0], command[-1]] if "-c" in command else command).encode()
    ctypes.memmove(begin, shown[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)
