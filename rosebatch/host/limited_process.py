"""Processes that answer one request at a time, within limits of time and memory, and die of what exceeds them.

A request is a line of JSON, perhaps with bytes after it, and so is an answer; ``within_limits`` is the other side.
Processes are started when they are needed, and wait for the next request after that.
"""

import atexit
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from threading import Lock
from typing import Any, Generic, TypeVar

P = TypeVar("P", bound="LimitedProcess")

_CODE = "import sys, importlib; sys.path[:] = {path!r}; importlib.import_module({module!r}).main()"


class LimitedProcess:
    """One process.

    Args:
        module: its ``main`` calls ``within_limits.answer_all``.
        descriptors: of open files that it gets too; their numbers are its arguments.

    Attributes:
        ended: whether it is gone.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, module: str, *descriptors: int) -> None:
        # Of a process group of its own: Ctrl-C in a terminal is for the parent alone.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE.format(path=sys.path, module=module), *map(str, descriptors)],
            pass_fds=descriptors,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            process_group=0,
        )
        self.ended = False

    @property
    def pid(self) -> int:
        """Its number."""
        return self._process.pid

    def ask(self, request: Mapping[str, Any], content: bytes = b"") -> dict[str, Any]:
        """Its answer.

        Args:
            request: with ``seconds`` of processor time and bytes of ``memory``, if it is answered within limits.
            content: what the request is about.

        Returns:
            what ``within_limits.answer_all`` says; ``died`` with the exit status if the process ended for another
            reason than its limits.
        """
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None
        line = b""
        with suppress(BrokenPipeError):
            requests.write(json.dumps({**request, "content_bytes": len(content)}).encode() + b"\n")
            requests.write(content)
            requests.flush()
            line = answers.readline()
        return json.loads(line) if line.endswith(b"\n") else _of_status(self.end())

    def end(self) -> int:
        """End it; returns its exit status, which is below 0 for a signal."""
        self.ended = True
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(OSError):
                pipe.close()
        return self._process.wait()


def _of_status(status: int) -> dict[str, Any]:
    """The answer of a process that ended instead."""
    if status == -signal.SIGPROF:
        return {"exceeds": "seconds"}
    # Libraries abort without memory. SIGKILL: the system ran out of it.
    return {"exceeds": "memory"} if status in (-signal.SIGABRT, -signal.SIGKILL) else {"died": status}


class IdleProcesses(Generic[P]):
    """Processes of one kind that wait for a request. Any thread may take one, and has it for itself meanwhile.

    Args:
        make: starts another one.
    """

    def __init__(self, make: Callable[[], P]) -> None:
        self._make = make
        self._lock = Lock()
        self.waiting: list[P] = []
        atexit.register(self.end_all)

    def take(self, suits: Callable[[P], bool] = lambda _: True) -> P:
        """A process that does nothing else now; if possible, one that suits."""
        with self._lock:
            found = next(filter(suits, self.waiting), None) or (self.waiting[-1] if self.waiting else None)
            if found is not None:
                self.waiting.remove(found)
                return found
        return self._make()

    def put(self, process: P) -> None:
        """Give a process back. One that has ended is forgotten."""
        if not process.ended:
            with self._lock:
                self.waiting.append(process)

    def end_all(self) -> None:
        """End those that wait."""
        with self._lock:
            while self.waiting:
                self.waiting.pop().end()
