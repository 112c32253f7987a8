"""Which blocks the pool hands out, in which order, and what it remembers of the ones given back."""

from array import array

import pytest

from rosebatch.engine.scheduling.block_pool import BlockPool

TOKENS = array("I", [1, 2])


def register(pool, block, name):
    """Make a block findable as the first one of prefixes with this label."""
    pool.prefixes.add(name, TOKENS, 0, [block])


def lookup(pool, name):
    return next(iter(pool.prefixes.find(name, TOKENS, 1)), None)


def taken(num_blocks, count, *names):
    """A pool whose first blocks are taken, and registered under names as far as there are any."""
    pool = BlockPool(num_blocks, block_size=2)
    assert pool.allocate(count) == list(range(count))
    for block, name in enumerate(names):
        register(pool, block, name)
    return pool


def test_allocate_hands_out_blocks_in_order():
    pool = BlockPool(num_blocks=4, block_size=2)
    assert (pool.allocate(3), pool.num_free) == ([0, 1, 2], 1)
    assert (pool.allocate(0), pool.allocate(1), pool.num_free) == ([], [3], 0)
    pool.check_integrity([[0, 1, 2], [3]])


def test_allocating_too_many_takes_nothing():
    pool = taken(2, 1)
    with pytest.raises(ValueError, match="2 blocks asked for, 1 free"):
        pool.allocate(2)
    assert pool.num_free == 1
    pool.check_integrity([[0]])


def test_blocks_that_nobody_finds_are_reused_first_and_latest_first():
    """Such a block is worth nothing: it goes before every cached one, and before untouched ones."""
    pool = BlockPool(num_blocks=5, block_size=2)
    first, second = pool.allocate(2), pool.allocate(2)
    pool.free(first)
    pool.free(second)
    assert pool.allocate(5) == [2, 3, 0, 1, 4]


def test_findable_blocks_are_evicted_last_and_least_recently_freed_first():
    pool = taken(4, 3, b"a", b"b", b"c")
    for block in (1, 0, 2):
        pool.free([block])
    # 3 was never used; then in the order in which the holders let go.
    assert pool.allocate(4) == [3, 1, 0, 2]


def test_findable_and_other_blocks_mixed():
    """Freed after a findable block, another one still goes first."""
    pool = taken(4, 4)
    register(pool, 0, b"a")
    register(pool, 2, b"c")
    for block in range(4):
        pool.free([block])
    assert pool.allocate(4) == [3, 1, 0, 2]


def test_tail_of_a_sequence_is_evicted_before_its_head():
    """A hit needs an unbroken chain from the start: losing the head first would make the tail useless."""
    names = b"a", b"b", b"c"
    pool = taken(3, 3, *names)
    pool.free([0, 1, 2])
    for block, left in (2, [0, 1, None]), (1, [0, None, None]), (0, [None, None, None]):
        assert pool.allocate(1) == [block]
        assert [lookup(pool, name) for name in names] == left


def test_a_tail_that_nobody_finds_goes_first():
    pool = taken(3, 3, b"a")
    pool.free([0, 1, 2])
    # 2 became free first, then 1 in front of it; the findable head stays behind both.
    assert pool.allocate(3) == [1, 2, 0]


def test_a_shared_block_is_free_after_its_last_holder_only():
    pool = taken(2, 1)
    pool.share([0])
    pool.check_integrity([[0], [0]])
    pool.free([0])
    assert pool.num_free == 1
    pool.check_integrity([[0]])
    pool.free([0])
    assert pool.num_free == 2
    pool.check_integrity([])


def test_share_revives_a_free_block():
    """A cached block taken over again must leave the free list, or it would be handed out under its holder."""
    pool = taken(2, 1, b"a")
    pool.free([0])
    pool.share([0])
    assert (pool.num_free, pool.allocate(1), lookup(pool, b"a")) == (1, [1], 0)
    pool.check_integrity([[0], [1]])


def test_sharing_renews_a_block():
    """Freed again, a revived block is the most recently used one."""
    pool = taken(2, 2, b"a", b"b")
    pool.free([0])
    pool.free([1])
    pool.share([0])
    pool.free([0])
    assert pool.allocate(2) == [1, 0]


def test_register_keeps_the_first_block_of_equal_contents():
    pool = taken(2, 2)
    register(pool, 0, b"a")
    register(pool, 1, b"a")
    assert lookup(pool, b"a") == 0
    pool.free([0, 1])
    # Nobody finds 1, so it goes first, and taking it must not drop the entry of 0.
    assert (pool.allocate(1), lookup(pool, b"a")) == ([1], 0)
    pool.check_integrity([[1]])


def test_a_block_is_at_one_place():
    pool = taken(1, 1, b"a")
    with pytest.raises(AssertionError, match="block 0 registered twice"):
        register(pool, 0, b"b")


def test_a_reused_block_is_forgotten_and_can_be_registered_again():
    pool = taken(1, 1, b"a")
    pool.free([0])
    pool.allocate(1)
    assert lookup(pool, b"a") is None
    register(pool, 0, b"b")
    assert lookup(pool, b"b") == 0
    pool.check_integrity([[0]])


def test_double_free_asserts():
    pool = taken(2, 1)
    pool.free([0])
    for block in range(2):
        with pytest.raises(AssertionError, match=f"block {block} freed more often than held"):
            pool.free([block])


def test_writable_needs_one_holder_and_nobody_who_finds_it():
    pool = taken(2, 1)
    assert pool.writable(0)
    pool.share([0])
    assert not pool.writable(0)
    pool.free([0])
    assert pool.writable(0)
    register(pool, 0, b"a")
    assert not pool.writable(0)
    # Without any holder nobody may write.
    assert not pool.writable(1)


@pytest.mark.parametrize(("holders", "message"), [([], "block 0"), ([[0], [0]], "block 0"), ([[0], [1]], "block 1")])
def test_check_integrity_notices_wrong_holders(holders, message):
    pool = taken(2, 1)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity(holders)
