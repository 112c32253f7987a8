"""Launches of Triton's kernels in the interpreter: noted instead of computed, or one at a time."""

from collections.abc import Callable
from threading import Lock
from typing import Any

import pytest
import torch

from tests.helpers.host_reads import HostReads


def note_launches(monkeypatch: pytest.MonkeyPatch, note: Callable[[str, Any, dict[str, Any]], None]) -> None:
    """Call ``note`` with the name, grid and keywords of each launch. What a kernel would compute is 0: all tokens are.

    Only the kernel that advances the state runs, or no sequence would end.
    """
    from triton.runtime import interpreter

    run = interpreter.GridExecutor.__call__

    def noted(self: Any, *args: Any, **kwargs: Any) -> None:
        note(self.fn.__name__, self.grid, kwargs)
        if self.fn.__name__ == "_advance":
            with HostReads.paused():
                run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", noted)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)


def one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where ranks are threads: the interpreter runs one kernel of a process."""
    from triton.runtime import interpreter

    turn, run = Lock(), interpreter.GridExecutor.__call__

    def alone(self: Any, *args: Any, **kwargs: Any) -> None:
        with turn:
            run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", alone)
