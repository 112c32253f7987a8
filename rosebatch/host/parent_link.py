"""The connection of a ``ChildProcess`` to its parent, seen from the child."""

import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from threading import Lock, Thread
from typing import Any


class ParentLink:
    """Messages from and to the parent. A thread receives, so the end of the parent ends this process in any state.

    Args:
        descriptor: of the connection.
        hear: called with each message of the parent, on another thread.
    """

    def __init__(self, descriptor: int, receive: Callable[[Any], None]) -> None:
        self._connection = Connection(descriptor)
        self._lock = Lock()
        Thread(target=self._receive, args=(receive,), daemon=True).start()

    def send(self, message: Any) -> None:
        """Send a message."""
        try:
            with self._lock:
                self._connection.send(message)
        except OSError:
            os._exit(1)

    def _receive(self, receive: Callable[[Any], None]) -> None:
        try:
            while True:
                receive(self._connection.recv())
        except (EOFError, OSError):
            os._exit(1)
