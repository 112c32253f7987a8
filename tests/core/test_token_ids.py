"""Token ids in 32 bits each."""

import gc

import pytest

from rosebatch.core.token_ids import TokenIds, packed


def test_packed_once():
    """Sorting, checks and hashes of a row each made an array of their own."""
    ids = TokenIds.of([3, 2**32 - 1, 0])
    assert list(ids) == [3, 2**32 - 1, 0]
    assert TokenIds.of(ids) is ids
    assert TokenIds.of((1,)).tobytes() == b"\1\0\0\0"
    assert not gc.get_referents(ids)[1:], "a search for garbage looked at each id"


@pytest.mark.parametrize(("ids", "error"), [([-1], OverflowError), ([2**32], OverflowError), ([1.5], TypeError)])
def test_no_token_ids(ids, error):
    with pytest.raises(error):
        TokenIds.of(ids)


def test_ids_of_no_model_stay_as_they_are():
    """The engine refuses them, with a message of its own."""
    assert packed([-1]) == [-1]
    assert isinstance(packed([1]), TokenIds)
