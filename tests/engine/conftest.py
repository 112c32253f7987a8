"""Short ways to make sequences and to run them without tensors."""

from collections.abc import Iterator

import pytest
import torch

from tests.engine.fake_runner import FakeRunner
from tests.helpers.sizes import change_table


@pytest.fixture
def fake_runner() -> FakeRunner:
    return FakeRunner()


@pytest.fixture
def unwritten_is_nan() -> Iterator[None]:
    """NaN in whatever is allocated without being filled."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """One split for each decoded sequence: what keys are divided into has its own tests, and programs take time.

    Keys that three rows share are a few items, and an item has few rows: most programs had none, and took half of the
    time.
    """
    from rosebatch.engine.triton_runner import prefix_groups
    from rosebatch_kernels.hp1 import attend_shared as hp1_attend_shared
    from rosebatch_kernels.hp1 import decode
    from rosebatch_kernels.hp1 import sizes as hp1_sizes
    from rosebatch_kernels.paged_attention import attend_shared, sizes

    change_table(monkeypatch, sizes, "decode", splits=((0, 1),))
    change_table(monkeypatch, hp1_sizes, programs=1)
    # A long group is computed to its end for a sequence of two keys.
    monkeypatch.setattr(decode, "runs_and_keys", lambda *_, **sizes: (16, 2))
    monkeypatch.setattr(prefix_groups, "max_items", lambda batch: 3)
    for kernel in (attend_shared, hp1_attend_shared):
        monkeypatch.setattr(kernel, "MEMBERS", 4)
