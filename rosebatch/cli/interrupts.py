"""SIGINT and SIGTERM end a run between two steps, never inside one."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from rosebatch.errors import InterruptionError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Remembers the first signal. A second one takes effect at once, as if nothing handled it."""

    def __init__(self) -> None:
        self._number: int | None = None

    def check(self) -> None:
        """Call this wherever the run may end.

        Raises:
            InterruptionError: a signal has come.
        """
        if self._number is not None:
            raise InterruptionError(self._number)

    @contextmanager
    def listen(self) -> Iterator[Callable[[], None]]:
        """Handle signals inside the ``with`` block; yields ``check``. Works in the main thread only."""
        before = {number: signal.signal(number, self._take) for number in _SIGNALS}
        try:
            yield self.check
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        for each in _SIGNALS:
            signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
