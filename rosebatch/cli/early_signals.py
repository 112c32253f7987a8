"""How SIGINT and SIGTERM end the process while nobody listens: at once, without Python."""

import os
import signal
from types import FrameType


def end_at_once() -> None:
    """Leave both signals to the system, until somebody handles them.

    Python would raise KeyboardInterrupt for SIGINT. In the middle of an import, that prints a traceback, is ignored, or
    aborts the process; and no handler of Python runs while a library loads. What a run leaves on the disk is safe
    whenever it ends.
    """
    # The system ignores signals to the first process of a container, unless that handles them.
    handler = _end if os.getpid() == 1 else signal.SIG_DFL
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)
