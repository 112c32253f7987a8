"""Hashes of blocks: equal for equal prefixes alone, however the blocks come."""

import random
from array import array
from itertools import pairwise

import numpy as np
import pytest

from rosebatch.engine.scheduling.block_hashes import HASH_BYTES, BlockHashes


def ids(*token_ids):
    return array("I", token_ids)


def of_prefix(hasher, token_ids, first=0, before=None):
    return hasher.of_prefixes(token_ids.tobytes(), [(first, len(token_ids) // hasher.block_size, before)])


def sums_of(block_hash):
    return np.frombuffer(block_hash, np.uint64).tolist()


def test_a_hash_is_the_sum_over_all_tokens_so_far():
    """By Python's whole numbers. The factors are read off the differences that one token makes."""
    hasher, zeros = BlockHashes(2), [0] * 6
    plain = [sums_of(each) for each in of_prefix(hasher, ids(*zeros))]
    tokens = [7, 0, 2**32 - 1, 1, 150_000, 3]
    expected = [list(each) for each in plain]
    for place, token in enumerate(tokens):
        changed = [sums_of(each) for each in of_prefix(hasher, ids(*zeros[:place], 1, *zeros[place + 1 :]))]
        for block, own in enumerate(expected):
            factors = [(new - old) % 2**64 for new, old in zip(changed[block], plain[block], strict=True)]
            assert all(factors) == (block >= place // 2)
            own[:] = [(total + token * factor) % 2**64 for total, factor in zip(own, factors, strict=True)]
    assert [sums_of(each) for each in of_prefix(hasher, ids(*tokens))] == expected


def test_hashes_do_not_depend_on_how_many_blocks_are_hashed_at_once():
    """A sequence's blocks come by and by, and those of several sequences together: each would miss the others'."""
    rng, hasher, size = random.Random(0), BlockHashes(3), 3
    prompts = [ids(*(rng.choice((0, 1, 2, 2**32 - 1)) for _ in range(size * 9))) for _ in range(20)]
    whole = [of_prefix(hasher, prompt) for prompt in prompts]
    assert {len(each) for hashes in whole for each in hashes} == {HASH_BYTES}
    for prompt, hashes in zip(prompts, whole, strict=True):
        first = rng.randrange(1, 9)
        assert of_prefix(hasher, prompt[first * size :], first, hashes[first - 1]) == hashes[first:]
    numbers = [rng.randrange(9) for _ in prompts]
    tokens = ids()
    for prompt, number in zip(prompts, numbers, strict=True):
        tokens += prompt[number * size : (number + 1) * size]
    before = [hashes[number - 1] if number else b"" for hashes, number in zip(whole, numbers, strict=True)]
    assert hasher.of_next(tokens, numbers, before) == [own[number] for own, number in zip(whole, numbers, strict=True)]
    # More blocks than any so far leave the factors of the others as they are.
    assert of_prefix(hasher, ids(*range(size * 400)))[399] and of_prefix(hasher, prompts[0]) == whole[0]


@pytest.mark.parametrize("other", [[1, 0, 3, 4], [2, 1, 3, 4], [1, 2, 4, 3], [3, 4, 1, 2], [1, 3, 2, 4], [1, 2, 3, 5]])
def test_other_tokens_have_another_hash(other):
    hasher = BlockHashes(2)
    assert of_prefix(hasher, ids(1, 2, 3, 4))[1] != of_prefix(hasher, ids(*other))[1]


def test_zeros_are_tokens():
    """A sum that leaves them out would give a prompt the keys of a shorter one."""
    hashes = of_prefix(BlockHashes(2), ids(*[0] * 40))
    assert len(set(hashes)) == 20
    assert all(set(sums_of(a)).isdisjoint(sums_of(b)) for a, b in pairwise(hashes))


def test_nobody_knows_the_factors_of_another_hasher():
    """With factors that are known, prompts can be written that collide."""
    assert of_prefix(BlockHashes(2), ids(1, 2)) != of_prefix(BlockHashes(2), ids(1, 2))
