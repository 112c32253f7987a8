"""Calls to the system that fail, or are the last ones of a process."""

import io
import os
import signal
from functools import partial
from pathlib import Path

import pytest

# The functions of ``os`` behind each call. pathlib uses them too.
CALLS = {name: [name] for name in ("write", "fsync", "mkdir", "ftruncate")}
CALLS |= {"rename": ["rename", "replace"], "unlink": ["unlink", "rmdir"]}


class Faults:
    """Lets one call fail: the one of this number, counted over the functions of a kind.

    Args:
        kind: a key of ``CALLS``.
        number: from 0.
        error: the error number; None for SIGKILL.
    """

    def __init__(self, kind, number, error):
        self.kind, self.number, self.error, self.count = kind, number, error, 0

    def install(self, patch):
        """Put the fault into the functions of ``os`` and into files that ``Path.open`` opens for writing."""
        for name in CALLS[self.kind]:
            patch.setattr(os, name, partial(self._call, getattr(os, name)))
        if self.kind == "write":
            real = Path.open
            patch.setattr(Path, "open", lambda path, mode="r", **rest: _open(self, real, path, mode, **rest))

    def strike(self):
        """Count a call; the chosen one fails."""
        self.count += 1
        if self.count - 1 == self.number:
            if self.error is None:
                os.kill(os.getpid(), signal.SIGKILL)
            else:
                raise OSError(self.error, os.strerror(self.error))

    def _call(self, real, *args, **options):
        # Half of what was to be written is there, as on a full disk.
        if self.kind == "write" and self.count == self.number:
            real(args[0], args[1][: len(args[1]) // 2])
        self.strike()
        return real(*args, **options)


def _open(faults, real, path, mode="r", **options):
    if mode != "wb":
        return real(path, mode, **options)

    class Raw(io.FileIO):
        def write(self, data):
            if faults.count == faults.number:
                super().write(data[: len(data) // 2])
            faults.strike()
            return super().write(data)

    return io.BufferedWriter(Raw(path, "w"), 100)


def call_with_faults(faults, function, *args):
    """Call a function, in a process that may be killed."""
    with pytest.MonkeyPatch.context() as patch:
        faults.install(patch)
        return function(*args)
