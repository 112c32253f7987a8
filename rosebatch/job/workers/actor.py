"""A worker inside a Ray actor. The actor's methods are called from the parent; the work has a thread of its own."""

import os
import pickle
import platform
from collections.abc import Mapping, Sequence
from contextlib import suppress
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any

from rosebatch.core.version import __version__
from rosebatch.host.child_process import Failed
from rosebatch.job.workers.child import Link, serve_parent

# Longest wait of one call of ``receive``.
_POLL_SECONDS = 5.0


class WorkerActor:
    """What the parent calls. Messages are pickled here: Ray's own pickling of many small objects is slow."""

    def __init__(self) -> None:
        self._link = _ActorLink()

    def start(self, environment: Mapping[str, str], folder: str) -> tuple[str, Sequence[str], str]:
        """Begin to work.

        Args:
            environment: variables that have to be set before PyTorch is imported.
            folder: the parent's working directory, for relative paths on a shared file system.

        Returns:
            the node's name, the GPUs of this worker, and the version of rosebatch.
        """
        os.environ.update(environment)
        with suppress(OSError):
            os.chdir(folder)
        Thread(target=self._work, name="rosebatch-work", daemon=True).start()
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return platform.node(), [gpu for gpu in gpus.split(",") if gpu], __version__

    def send(self, pickled: bytes) -> None:
        """Take messages of the parent."""
        for message in pickle.loads(pickled):
            self._link.deliver(message)

    def receive(self) -> bytes:
        """The messages for the parent since the last call, in order: as soon as there is one, perhaps none.

        Raises:
            RuntimeError: the work has ended.
        """
        messages = self._link.outgoing()
        for place, error in enumerate(messages):
            if isinstance(error, Exception):
                if place == 0:
                    raise RuntimeError(f"{type(error).__name__}: {error}")
                # Those before it first; nothing after it matters.
                self._link.send(error)
                messages = messages[:place]
                break
        return pickle.dumps(messages, protocol=pickle.HIGHEST_PROTOCOL)

    def _work(self) -> None:
        try:
            serve_parent(self._link)
            # Of itself, an actor stays alive.
            self._link.send(EOFError("the work has ended"))
        except Exception as error:
            self._link.send(error)


class _ActorLink(Link):
    """Messages wait here for the parent's calls."""

    def __init__(self) -> None:
        super().__init__()
        self._outbox: SimpleQueue[Any] = SimpleQueue()

    def send(self, message: Any) -> None:
        """See ``Link``. An error of the model's files names the node, which may lack them."""
        if isinstance(message, Failed) and not message.is_usage:
            message = Failed(f"{platform.node()}: {message.message}")
        self._outbox.put(message)

    def outgoing(self) -> list[Any]:
        """The messages to send; waits for the first."""
        messages: list[Any] = []
        with suppress(Empty):
            messages.append(self._outbox.get(timeout=_POLL_SECONDS))
            while True:
                messages.append(self._outbox.get_nowait())
        return messages
