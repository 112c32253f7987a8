"""The command line as a fork of a process that has imported everything, and its workers as forks of it.

An interpreter takes 2 s of processor time to import PyTorch, and a job has several of them. What differs from a job of
interpreters: nothing is left to import. Tests of imports, of signals during them, of closed streams and of variables
that are read at an import start interpreters.
"""

import atexit
import ctypes
import fcntl
import functools
import importlib
import json
import multiprocessing
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch

from rosebatch.cli.early_signals import end_at_once
from rosebatch.host import child_process
from tests.helpers.forks import FORKS

_CLIENT = Path(__file__).with_name("forked_client.py")
_MAX_DESCRIPTORS = 100
_FORK = multiprocessing.get_context("fork")


class ForkedJob:
    """``python -m rosebatch`` as a fork, with the methods of a ``Popen``.

    Args:
        arguments: of the command.
        environment: all variables of the process.
        folder: where it works. It writes ``stderr`` there, and gets a session of its own.

    Signals are the job's own once this returns.
    """

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        # It is there as soon as the job is, as behind a redirection.
        Path(folder, "stderr").touch()
        begun, begins = FORKS.Pipe(duplex=False)
        self._process = FORKS.Process(target=_run, args=(arguments, dict(environment), str(folder), begins))
        self._process.start()
        self.pid: int = self._process.pid or 0
        begins.close()
        with begun, suppress(EOFError):
            begun.recv()

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


def python() -> str:
    """In place of ``sys.executable``: a fork does what it is to do, and ends with the process that was started."""
    return f"{_server(os.getpid())}/python"


def fork_children(patch: pytest.MonkeyPatch) -> None:
    """Let each ``ChildProcess`` of this process be a fork."""

    def popen(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([python(), *command[1:]], **options)

    patch.setattr(child_process, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": popen}))


@functools.cache
def _server(process: int) -> str:
    """The folder of a server, which forks. Each of the forks that run tests has its own."""
    folder = Path(tempfile.mkdtemp(prefix="fork-", dir="/tmp"))
    # An option before the command is about Python itself.
    (folder / "python").write_text(
        f'#!/bin/sh\ncase "$1" in -[!cm]*) exec "{sys.executable}" "$@";; esac\n'
        f'exec "{sys.executable}" -IS "{_CLIENT}" "{folder}/socket" "$@"\n'
    )
    (folder / "python").chmod(0o755)
    listens, begins = FORKS.Pipe(duplex=False)
    server = FORKS.Process(target=_serve, args=(str(folder), begins))
    server.start()
    # Else the end of this process would wait for the server's.
    atexit.register(server.kill)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    with listens, begins:
        listens.recv()
    return str(folder)


def _serve(folder: str, begins: Connection) -> None:
    """In a fork of the fork server: fork for each client, until the tests end."""
    sys.executable = f"{folder}/python"
    parent = multiprocessing.parent_process()
    assert parent is not None
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{folder}/socket")
        listener.listen()
        begins.send(None)
        begins.close()
        while parent.sentinel not in wait([listener, parent.sentinel]):
            with listener.accept()[0] as client:
                if not os.fork():
                    try:
                        _answer(client)
                    finally:
                        os._exit(1)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    shutil.rmtree(folder, ignore_errors=True)


def _answer(client: socket.socket) -> None:
    """Serve a client; the answer is the exit code. See ``forked_client.py``."""
    size, descriptors, *_ = socket.recv_fds(client, 8, _MAX_DESCRIPTORS)
    with client.makefile("rb") as told:
        *task, numbers = json.loads(told.read(int.from_bytes(size)))
    process = _FORK.Process(target=_interpret, args=(*task, dict(zip(numbers, descriptors, strict=True))))
    process.start()
    for descriptor in descriptors:
        os.close(descriptor)
    if client in wait([client, process.sentinel]):
        process.kill()
    process.join()
    with suppress(BrokenPipeError):
        client.sendall(str(process.exitcode).encode())


def _interpret(arguments: list[str], environment: dict[str, str], folder: str, descriptors: dict[int, int]) -> None:
    """Do what Python does with its arguments."""
    os.chdir(folder)
    _take(descriptors)
    _start_forks_as_children()
    kind, *rest = arguments
    argv = {"-m": rest, "-c": [kind, *rest[1:]]}.get(kind, arguments)
    _begin([sys.executable, *arguments], argv, environment)
    try:
        if kind == "-m":
            sys.path.insert(0, folder)
            runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        elif kind == "-c":
            exec(rest[0], {"__name__": "__main__"})
        else:
            sys.path.insert(0, str(Path(kind).resolve().parent))
            runpy.run_path(kind, run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def _run(arguments: Sequence[str], environment: dict[str, str], folder: str, begins: Connection) -> None:
    """In a fork of the fork server."""
    os.setsid()
    os.chdir(folder)
    for number, name in enumerate((os.devnull, os.devnull, "stderr")):
        os.dup2(os.open(name, os.O_RDWR | os.O_CREAT | os.O_TRUNC), number)
    _start_forks_as_children()
    _begin([sys.executable, "-m", "rosebatch", *arguments], ["rosebatch", *arguments], environment)
    end_at_once()
    begins.send(None)
    begins.close()
    try:
        runpy.run_module("rosebatch", run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def _start_forks_as_children() -> None:
    setattr(child_process, "subprocess", SimpleNamespace(**vars(subprocess) | {"Popen": _ForkedPopen}))  # noqa: B010


def _run_child(command: Sequence[str], environment: dict[str, str], streams: Sequence[int], link: int) -> NoReturn:
    """In a fork of a job. No thread of the job goes on here, and what the job has open is closed."""
    try:
        _take({**dict(enumerate(streams)), link: link})
        *_, module = command
        _begin(command, ["-c", *command[3:]], environment)
        importlib.import_module(module).main()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def _take(descriptors: Mapping[int, int]) -> None:
    """Have these under new numbers, and no others."""
    # A new number may be that of another one.
    above = max([*descriptors, *descriptors.values()]) + 1
    kept = {number: fcntl.fcntl(each, fcntl.F_DUPFD, above) for number, each in descriptors.items()}
    for number, each in kept.items():
        os.dup2(each, number)
    ends = sorted(kept)
    for end, begin in zip(ends, [*ends[1:], os.sysconf("SC_OPEN_MAX")], strict=True):
        os.closerange(end + 1, begin)


def _begin(command: Sequence[str], argv: Sequence[str], environment: dict[str, str]) -> None:
    """Look like an interpreter that has just started."""
    if sys.platform == "linux":
        _show_command(command)
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    sys.orig_argv[:], sys.argv[:] = command, argv
    sys.stdin, sys.stdout = open(0, closefd=False), open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, closefd=False)  # noqa: SIM115
    signal.set_wakeup_fd(-1)
    for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP, signal.SIGPIPE}:
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", 1)))
    for folder in environment.get("PYTHONPATH", "").split(os.pathsep):
        if (module := Path(folder) / "sitecustomize.py").exists():
            runpy.run_path(str(module))


def _show_command(command: Sequence[str]) -> None:
    """For ``ps``: over the arguments that the fork server was started with. The last one of a long command counts."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    begin, end = int(fields[45]), int(fields[46])
    shown = "\0".join([command[0], command[-1]] if "-c" in command else command).encode()
    ctypes.memmove(begin, shown[: end - begin - 1].ljust(end - begin, b"\0"), end - begin)
