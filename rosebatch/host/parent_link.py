"""The connection of a ``ChildProcess`` to its parent, seen from the child."""

import os
from multiprocessing.connection import Connection
from queue import SimpleQueue
from threading import Lock, Thread
from typing import Any


class ParentLink:
    """Messages from and to the parent. A thread receives, so the end of the parent ends this process in any state."""

    def __init__(self, descriptor: int) -> None:
        self._connection = Connection(descriptor)
        self._lock = Lock()
        self._inbox: SimpleQueue[Any] = SimpleQueue()
        Thread(target=self._receive, daemon=True).start()

    def tell(self, message: Any) -> None:
        """Send a message."""
        try:
            with self._lock:
                self._connection.send(message)
        except OSError:
            os._exit(1)

    def hear(self) -> Any:
        """Wait for the next message."""
        return self._inbox.get()

    def _receive(self) -> None:
        try:
            while True:
                self._inbox.put(self._connection.recv())
        except (EOFError, OSError):
            os._exit(1)
