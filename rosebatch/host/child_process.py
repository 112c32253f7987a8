"""A Python process that is started, told, heard and ended."""

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
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Thread
from typing import Any

# The child imports what its parent imports, wherever that was found.
_START = (
    "import sys, json, importlib; sys.path[:] = json.loads(sys.argv[2]); importlib.import_module(sys.argv[3]).main()"
)
# Of what a process wrote to stderr before it died.
_MAX_SHOWN = 2000


class ChildProcess:
    """A child process and two threads: one sends to it, one receives.

    Neither thread holds up the parent when the child is stopped or slow. The child ends with its parent: it reads the
    end of the connection then.

    Args:
        module: its ``main`` is called; the first argument of the process is the descriptor of its connection.
        environment: variables that the child has beside the parent's, before it imports anything.
        hear: called with each message, and with None once the child is gone. On another thread.
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
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()

    def how_it_ended(self) -> str:
        """For people, once the process is gone: its signal or exit code, and the last line that it wrote."""
        code = self._process.wait()
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        line = self._last_line()
        return f"{how}: {line}" if line else how

    def _last_line(self) -> str:
        if self._errors is None:
            return ""
        with suppress(OSError, ValueError):
            self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _MAX_SHOWN))
            lines = self._errors.read().decode(errors="replace").split("\n")
            return next((line.strip() for line in reversed(lines) if line.strip()), "")
        return ""

    def _send(self, connection: Connection) -> None:
        # A child that is gone is heard of by the other thread.
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
