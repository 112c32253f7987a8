"""Other sizes of kernels' programs for a test."""

from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest

from rosebatch_kernels.common.sizes import table


def change_table(monkeypatch: pytest.MonkeyPatch, module: ModuleType, part: str = "", **changes: Any) -> None:
    """Engines that are built, and ``Launchers``, take these sizes; ``part`` is a field of the module's sizes."""
    whole = module.SIZES.measured
    new = replace(getattr(whole, part) if part else whole, **changes)
    monkeypatch.setattr(module, "SIZES", table(replace(whole, **{part: new}) if part else new))
