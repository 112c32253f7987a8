"""Engines in processes of their own, which are loaded one after the other and then measured one after the other.

vLLM takes a minute and more to start, so all are loaded before the first is measured. It fails if memory comes or goes
while it looks how much there is: so no two load at once.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import IO, Any, cast

# A process to start: its command and its environment.
Started = tuple[Sequence[str], Mapping[str, str]]


def measure_in_turn(engines: Mapping[str, Started]) -> Iterator[tuple[str, Any]]:
    """What each process answers, by its name; ``{"failed": …}`` where one has none."""
    processes = dict[str, subprocess.Popen[str]]()
    for name, (command, environment) in engines.items():
        processes[name] = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        cast(IO[str], processes[name].stdout).readline()
    for name, process in processes.items():
        answer, _ = process.communicate("\n")
        lines = answer.splitlines()
        yield name, json.loads(lines[-1]) if lines and process.returncode == 0 else {"failed": process.returncode}


class Turn:
    """The side of such a process. Made before the engine, which writes to stdout, too."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)

    def wait(self) -> None:
        """The engine is loaded: wait until the others are, and those before this one are measured."""
        self._write("loaded")
        sys.stdin.readline()

    def answer(self, found: Any) -> None:
        """Give what was found, and end: engines leave processes behind."""
        self._write(json.dumps(found))
        os._exit(0)

    def _write(self, line: str) -> None:
        self._out.write(f"{line}\n")
        self._out.flush()
