"""Token ids of NumPy as prompts."""

import tracemalloc

import numpy as np
import pytest

from rosebatch.core.token_ids import TokenIds
from rosebatch.llm import prompts


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int64, np.uint64, ">i4"])
@pytest.mark.parametrize("step", [1, -1, 3])
def test_ids_of_any_kind_and_length(monkeypatch, dtype, step):
    """They are copied in pieces: all of them, in their order, whatever lies between them."""
    monkeypatch.setattr(prompts, "_COPIED_AT_ONCE", 4)
    for count in (1, 3, 4, 5, 8, 120):
        given = np.arange(count, dtype=dtype)[::step]
        found = prompts.prompt_fields(given)["prompt_token_ids"]
        assert isinstance(found, TokenIds)
        assert found.tolist() == given.tolist()


def test_memory_of_many_ids():
    """30 million of them took 360 MB beside the caller's array: three times what stays."""
    given = np.arange(4_000_000)
    tracemalloc.start()
    try:
        found = prompts.prompt_fields(given)["prompt_token_ids"]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(found) == 4_000_000
    assert peak < 1.25 * 4 * 4_000_000
