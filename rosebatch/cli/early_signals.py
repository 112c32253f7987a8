"""How SIGINT and SIGTERM end the process while nobody listens: at once, without Python."""

import os
import signal
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM)


def end_at_once() -> None:
    """Leave both signals to the system, until somebody handles them.

    Python would raise KeyboardInterrupt for SIGINT. In the middle of an import, that prints a traceback, is ignored, or
    aborts the process; and no handler of Python runs while a library loads. What a run leaves on the disk is safe
    whenever it ends. A signal that the process was started to ignore, such as SIGINT behind ``nohup`` or in the
    background of a script, stays ignored.
    """
    # The system ignores signals to the first process of a container, unless that handles them.
    handler = _end if os.getpid() == 1 else signal.SIG_DFL
    for number in SIGNALS:
        if not is_ignored(number):
            signal.signal(number, handler)


def is_ignored(number: int) -> bool:
    """Whether a signal is ignored. Then it should stay so, for who started the process wanted that."""
    return signal.getsignal(number) is signal.SIG_IGN


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
