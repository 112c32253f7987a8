"""What is done before a signal ends the process."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def before_the_end(clean_up: Callable[[], None]) -> Iterator[None]:
    """Clean up if SIGINT or SIGTERM end the process inside the ``with`` block.

    Signals that somebody handles or ignores stay as they are, and so do all in other threads than the main one.
    """

    def end(number: int, frame: FrameType | None) -> None:
        clean_up()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    is_main = threading.current_thread() is threading.main_thread()
    ending = [n for n in (signal.SIGINT, signal.SIGTERM) if is_main and signal.getsignal(n) is signal.SIG_DFL]
    for number in ending:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_DFL)
