"""SIGINT and SIGTERM end a run between two steps. If that takes too long, a thread ends the process."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Event, Lock, Thread
from types import FrameType
from typing import NoReturn

from rosebatch.cli.early_signals import SIGNALS, is_ignored
from rosebatch.core.errors import InterruptionError

# What a run has after a signal. Some calls take minutes and cannot be interrupted: a step of a large model, a text of
# 100 MB, a grammar.
_GRACE_SECONDS = 1.5
# A progress bar may have hidden it.
_SHOW_CURSOR = "\x1b[?25h"


def raise_for_signals() -> None:
    """Let a signal raise wherever the process is: files and processes that are to be left behind by nobody go then."""
    for number in SIGNALS:
        if not is_ignored(number):
            signal.signal(number, _raise)


def _raise(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt if number == signal.SIGINT else InterruptionError(number)


def _nothing() -> str:
    return ""


class Interrupts:
    """Remembers the first signal. A second one takes effect at once, as if nothing handled it."""

    def __init__(self) -> None:
        self._number: int | None = None
        self._kept: Callable[[], str] = _nothing
        # Held by whoever decides how the process ends: else both threads would say so.
        self._ending = Lock()

    def check(self) -> None:
        """Call this wherever the run may end.

        Raises:
            InterruptionError: a signal has come.
        """
        if self._number is not None:
            raise InterruptionError(self._number)

    @contextmanager
    def listen(self, kept: Callable[[], str] = _nothing) -> Iterator[Callable[[], None]]:
        """Handle signals inside the ``with`` block, but those that are ignored; yields ``check``.

        Works in the main thread only.

        Args:
            kept: where the results so far are, should the process have to end at once. Another thread calls it.
        """
        before = {number: signal.signal(number, self._take) for number in SIGNALS if not is_ignored(number)}
        self._kept = kept
        try:
            yield self.check
        finally:
            self._kept = _nothing
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def watch(self) -> Iterator[None]:
        """End the process if the ``with`` block goes on for long after a signal. Works in the main thread only.

        Python runs its handlers between two of its instructions, so a long call holds them up. But the system's own
        handler writes to a pipe at once, and a thread reads that.
        """
        read, write = os.pipe()
        os.set_blocking(write, False)
        before, ended = signal.set_wakeup_fd(write, warn_on_full_buffer=False), Event()
        Thread(target=self._await_end, args=(read, ended), name="signals", daemon=True).start()
        try:
            yield
        finally:
            with self._ending:
                ended.set()
            signal.set_wakeup_fd(before)
            os.close(write)

    def _await_end(self, pipe: int, ended: Event) -> None:
        with os.fdopen(pipe, "rb", buffering=0) as signals:
            while numbers := signals.read(1):
                if numbers[0] in SIGNALS and not ended.wait(_GRACE_SECONDS):
                    with self._ending:
                        if not ended.is_set():
                            self._end(numbers[0])

    def _end(self, number: int) -> None:
        error = InterruptionError(number, self._kept())
        # It may be closed, or nobody reads it.
        with suppress(OSError, ValueError):
            cursor = _SHOW_CURSOR if os.isatty(2) else ""
            os.set_blocking(2, False)
            os.write(2, f"{cursor}rosebatch: error: {error}\n".encode(errors="replace"))
        os._exit(error.exit_code)

    def _take(self, number: int, frame: FrameType | None) -> None:
        self._number = number
        for each in SIGNALS:
            if not is_ignored(each):
                signal.signal(each, signal.default_int_handler if each == signal.SIGINT else signal.SIG_DFL)
