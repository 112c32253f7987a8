"""Which blocks of other sequences a sequence finds, in whatever order these come."""

import random

import pytest
from msgspec import structs

from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.block_tables import BlockTables
from rosebatch.engine.scheduling.prefix_cache import PrefixCache
from rosebatch.engine.scheduling.sequence import SequenceState
from tests.engine.fake_runner import make_sequence

SIZE = 3


def sequences_that_begin_alike(rng: random.Random, count: int) -> list[SequenceState]:
    """Of two tokens, some with another salt, some with generated tokens."""
    sequences = []
    for number in range(count):
        sequence = make_sequence([rng.randrange(2) for _ in range(rng.randrange(1, 8))], id=number)
        sequence.restart(structs.replace(sequence.spec, salt=rng.choice((b"", b"", b"long"))))
        sequence.apply_token_ids([rng.randrange(2) for _ in range(rng.randrange(6))])
        sequences.append(sequence)
    return sequences


def identities(sequence: SequenceState, *, exact: bool) -> list[tuple[object, ...]]:
    """What two blocks must have in common to be one."""
    tokens, prompt = tuple(sequence.token_ids), sequence.num_prompt_tokens
    ends = range(SIZE, len(tokens) + 1, SIZE)
    return [(sequence.spec.salt, tokens[:end], prompt if exact and end > prompt else None) for end in ends]


@pytest.mark.parametrize("exact", [False, True])
def test_a_block_is_found_if_its_keys_are_the_same(exact):
    """One too many in common would give a row foreign K and V."""
    rng = random.Random(exact)
    pool = BlockPool(2000, SIZE)
    cache = PrefixCache(BlockTables([pool]), enabled=True, exact=exact)
    known: dict[tuple[object, ...], int] = {}
    hits = 0
    for sequence in sequences_that_begin_alike(rng, 600):
        names = identities(sequence, exact=exact)
        cache.take(sequence)
        found = [known[name] for name in names if name in known]
        assert sequence.block_ids == found == [known[name] for name in names[: len(found)]]
        hits += len(found)
        sequence.tables = [[*sequence.block_ids, *pool.allocate(len(names) - len(found))]]
        # In one chunk, or a token after the other.
        stop, step = len(sequence.token_ids), rng.choice((1, 2, 20))
        for start in range(0, stop, step):
            cache.register(sequence, start, min(start + step, stop))
        known |= dict(zip(names, sequence.block_ids, strict=True))
        pool.prefixes.check_integrity()
    assert hits > len(known) > 100
