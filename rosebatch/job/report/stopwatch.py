"""The host's time, by kind of work."""

import time
from collections import defaultdict


class Stopwatch:
    """Adds the seconds of a ``with`` block to a total, by name."""

    __slots__ = ("_name", "_seconds", "_started")

    def __init__(self, seconds: defaultdict[str, float], name: str) -> None:
        self._seconds = seconds
        self._name = name

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self._seconds[self._name] += time.perf_counter() - self._started
