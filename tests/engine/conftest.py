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
    """One split for each decoded sequence: what keys are divided into has its own tests, and programs take time."""
    from rosebatch_kernels.hp1 import decode
    from rosebatch_kernels.hp1 import sizes as hp1_sizes
    from rosebatch_kernels.paged_attention import sizes

    change_table(monkeypatch, sizes, "decode", splits=((0, 1),))
    change_table(monkeypatch, hp1_sizes, programs=1)
    # A long group is computed to its end for a sequence of two keys.
    monkeypatch.setattr(decode, "runs_and_keys", lambda *_, **sizes: (16, 2))
