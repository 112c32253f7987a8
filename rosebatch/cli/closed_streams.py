"""Descriptors 0 to 2 belong to the standard streams, also where the caller closed those."""

import os
import sys


def fill_closed_streams() -> None:
    """Open the null device in place of closed standard streams.

    Else the next file would get such a descriptor, and a message of a library would be written into it. Reading a
    closed stdin and writing to a closed stdout still fail, so that nothing is lost in silence. stderr takes everything.
    """
    for descriptor, mode in enumerate((os.O_WRONLY, os.O_RDONLY, os.O_WRONLY)):
        try:
            os.fstat(descriptor)
        except OSError:
            # The system gives the lowest free number, and the loop begins with it.
            os.open(os.devnull, mode)
            os.set_inheritable(descriptor, True)
    # Python has None for a closed stream.
    sys.stdin = sys.stdin or os.fdopen(0, "r", closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False, errors="backslashreplace")
