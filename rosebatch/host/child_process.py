"""Python processes that a parent starts, and the connection between them: messages are plain values, pickled."""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any, NoReturn, TypeVar

from rosebatch.core.errors import FlagError, UserError
from rosebatch.host.garbage import search_seldom

L = TypeVar("L")

# The child imports what its parent imports, wherever that was found.
_START = (
    "import sys, json, importlib; sys.path[:] = json.loads(sys.argv[2]); importlib.import_module(sys.argv[3]).main()"
)
# How long the end of a killed process is waited for: one that a driver holds may never end.
_END_SECONDS = 5.0
# Of what a process wrote to stderr before it died.
_MAX_SHOWN = 2000


@dataclass(frozen=True, slots=True)
class Failed:
    """From a child, the last message: it cannot go on.

    Attributes:
        message: for people.
        is_usage: whether a flag is the reason.
    """

    message: str
    is_usage: bool = False

    @classmethod
    def of(cls, error: Exception) -> "Failed":
        """The message about an error."""
        if isinstance(error, UserError):
            return cls(str(error), isinstance(error, FlagError))
        return cls(f"{type(error).__name__}: {error}")

    @property
    def error(self) -> UserError:
        """The user's mistake, to be raised in the parent."""
        return (FlagError if self.is_usage else UserError)(self.message)


class ChildProcess:
    """A child process and two threads: one sends to it, one receives.

    Neither thread holds up the parent when the child is stopped or slow. The child ends with its parent: it reads the
    end of the connection then.

    Args:
        module: its ``main`` is called, see ``run_child``.
        environment: further variables of the child, set before it imports anything.
        receive: called with each message, and with None once the child is gone. On another thread.
        loud: whether the child's stderr is the parent's.
    """

    def __init__(
        self, module: str, environment: Mapping[str, str], receive: Callable[[Any], None], *, loud: bool
    ) -> None:
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._errors = None if loud else tempfile.TemporaryFile()  # noqa: SIM115
        if self._errors is not None:
            weakref.finalize(self, self._errors.close)
        own, other = socket.socketpair()
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START, str(other.fileno()), json.dumps(sys.path), module],
                pass_fds=[other.fileno()],
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._errors,
            )
        connection = Connection(own.detach())
        Thread(target=self._send, args=(connection,), daemon=True).start()
        Thread(target=self._receive, args=(connection, receive), daemon=True).start()

    def send(self, message: Any) -> None:
        """Send a message, which is not None, without waiting."""
        self._outbox.put(message)

    def kill(self) -> None:
        """End the process at once, and wait for that."""
        self._process.kill()
        self._code()

    def how_it_ended(self) -> str:
        """For people, once the process is gone: its signal or exit code, and the last line that it wrote."""
        code = self._code()
        if code is None:
            return "it cannot be ended"
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        line = self._last_line()
        return f"{how}: {line}" if line else how

    def _code(self) -> int | None:
        """The exit code; None if the process does not end."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(_END_SECONDS)
        return None

    def _last_line(self) -> str:
        if self._errors is None:
            return ""
        with suppress(OSError, ValueError):
            self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _MAX_SHOWN))
            lines = self._errors.read().decode(errors="replace").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""

    def _send(self, connection: Connection) -> None:
        # The other thread notices when a child is gone.
        with suppress(OSError, ValueError):
            while (message := self._outbox.get()) is not None:
                connection.send(message)

    def _receive(self, connection: Connection, receive: Callable[[Any], None]) -> None:
        try:
            while True:
                receive(connection.recv())
        except (EOFError, OSError):
            self._outbox.put(None)
            receive(None)


class ParentLink:
    """The connection of a child to its parent. A thread receives, so the end of the parent ends this process at once.

    Args:
        descriptor: of the connection.
        deliver: called with each message of the parent, on another thread; None keeps them for ``receive``.
    """

    def __init__(self, descriptor: int, deliver: Callable[[Any], None] | None = None) -> None:
        self._connection = Connection(descriptor)
        self._lock = Lock()
        inbox: SimpleQueue[Any] = SimpleQueue()
        self.receive = inbox.get
        Thread(target=self._deliver, args=(deliver or inbox.put,), daemon=True).start()

    def send(self, message: Any) -> None:
        """Send a message."""
        try:
            with self._lock:
                self._connection.send(message)
        except OSError:
            os._exit(1)

    def _deliver(self, deliver: Callable[[Any], None]) -> None:
        try:
            while True:
                deliver(self._connection.recv())
        except (EOFError, OSError):
            os._exit(1)


def run_child(work: Callable[[L], None], link: Callable[[int], L]) -> NoReturn:
    """The main function of a child.

    Args:
        work: what the child does.
        link: makes its connection to the parent, given the descriptor.
    """
    # Ctrl-C in a terminal, timeout and Slurm reach all processes: the parent decides what becomes of it. With the
    # parent this one ends anyway.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    search_seldom()
    work(link(int(sys.argv[1])))
    # To take PyTorch apart takes half a second.
    os._exit(0)
