"""Masks of several completions, made by llguidance on all cores while Python goes on."""

import atexit
import functools
import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from threading import Event
from typing import TYPE_CHECKING

import numpy as np

from rosebatch.host.threads import DaemonPool

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher


class Filling:
    """Masks of what may follow now in each of several matchers. Until ``wait`` returns, nothing else may use these.

    Args:
        matchers: R of them.
        num_words: of a mask.

    Attributes:
        words: ``[R, num_words]`` int32, a bit for each token; see ``wait``.
    """

    def __init__(self, matchers: "Sequence[LLMatcher]", num_words: int) -> None:
        self.words = np.empty((len(matchers), num_words), np.int32)
        self._pairs = [(matcher, row) for row, matcher in enumerate(matchers)]
        self._finish: Callable[[], object] | None = self._fill

    def begin(self) -> None:
        """Make the masks on other threads; else ``wait`` makes them."""
        begun = Event()
        made: Future[None] = _thread().submit(self._fill, begun)
        self._finish = made.result
        # The thread needs Python's lock until llguidance works. This thread would keep it for milliseconds.
        begun.wait()

    def wait(self) -> None:
        """Wait until all masks are made."""
        if self._finish is not None:
            self._finish()
            self._finish = None

    def _fill(self, begun: Event | None = None) -> None:
        from llguidance.numpy import fill_next_token_bitmask_par

        if begun is not None:
            begun.set()
        fill_next_token_bitmask_par(executor(), self._pairs, self.words)
        self._pairs.clear()


@functools.cache
def executor() -> "LLExecutor":
    """The threads of llguidance: four for five cores."""
    from llguidance import LLExecutor

    return LLExecutor()


@functools.cache
def _thread() -> DaemonPool:
    pool, process = DaemonPool(1, "rosebatch-masks"), os.getpid()

    def wait() -> None:
        # A forked process has no such thread.
        if os.getpid() == process:
            pool.submit(lambda: None).result()

    # A thread that comes back from llguidance must find an interpreter.
    atexit.register(wait)
    return pool
