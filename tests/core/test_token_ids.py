"""Token ids with the same in 32 bits each."""

from array import array

import pytest

from rosebatch.core.token_ids import TokenIds


def test_packed_once():
    """Sorting, checks and hashes of a row each made an array of their own."""
    ids = TokenIds([3, 2**32 - 1, 0])
    assert ids == (3, 2**32 - 1, 0)
    assert ids.packed == array("I", [3, 2**32 - 1, 0])
    assert ids.packed is ids.packed
    assert TokenIds.of(ids) is ids
    assert TokenIds.of([1]).packed.tobytes() == b"\1\0\0\0"


@pytest.mark.parametrize(("ids", "error"), [([-1], OverflowError), ([2**32], OverflowError), ([1.5], TypeError)])
def test_no_token_ids(ids, error):
    with pytest.raises(error):
        _ = TokenIds(ids).packed
