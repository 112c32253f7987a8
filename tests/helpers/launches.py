"""Notes the launches of Triton's kernels in the interpreter instead of computing them."""

from collections.abc import Callable
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
