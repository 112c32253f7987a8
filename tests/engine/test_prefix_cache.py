"""Hashes of a sequence's blocks: what they depend on, and how they come."""

import random

from msgspec import structs

from rosebatch.engine.scheduling import prefix_cache
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.block_tables import BlockTables
from rosebatch.engine.scheduling.prefix_cache import PrefixCache
from rosebatch.engine.scheduling.sequence import SequenceState
from tests.engine.fake_runner import make_sequence

SIZE = 3


def make_cache(*, exact: bool) -> PrefixCache:
    return PrefixCache(BlockTables([BlockPool(9, SIZE)]), enabled=True, exact=exact)


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
    """What two blocks must have in common to have one hash."""
    tokens, prompt = list(sequence.token_ids), sequence.num_prompt_tokens
    ends = range(SIZE, len(tokens) + 1, SIZE)
    return [(sequence.spec.salt, tokens[:end], prompt if exact and end > prompt else None) for end in ends]


def test_blocks_have_one_hash_if_their_keys_are_the_same(monkeypatch):
    """One too many in common would give a row foreign K and V."""
    rng = random.Random(0)
    for exact in (False, True):
        cache = make_cache(exact=exact)
        by_hash: dict[bytes, object] = {}
        names: set[str] = set()
        sequences = sequences_that_begin_alike(rng, 600)
        # Two thirds come in groups, a few blocks of which are hashed together.
        monkeypatch.setattr(prefix_cache, "_AT_ONCE", 4 * SIZE)
        for start in range(0, 400, 20):
            cache.look(sequences[start : start + 20])
        rng.shuffle(sequences)
        for sequence in sequences:
            cache.take(sequence)
            for block_hash, identity in zip(sequence.block_hashes, identities(sequence, exact=exact), strict=True):
                assert by_hash.setdefault(block_hash, identity) == identity
                names.add(repr(identity))
        assert len(by_hash) == len(names) > 100


def test_hashes_are_the_same_for_many_sequences_at_once():
    """Those of a decode window are hashed together, whichever block each of them fills."""
    rng = random.Random(1)
    for exact in (False, True):
        cache = make_cache(exact=exact)
        sequences = sequences_that_begin_alike(rng, 300)
        for sequence in sequences:
            cache.take(sequence)
        whole = [list(sequence.block_hashes) for sequence in sequences]
        for sequence in sequences:
            del sequence.block_hashes[rng.randrange(len(sequence.block_hashes) + 1) :]
        cache.look_on([(sequence, len(sequence.token_ids)) for sequence in sequences])
        known = [len(sequence.block_hashes) for sequence in sequences]
        assert [sequence.block_hashes for sequence in sequences] == [
            hashes[:count] for hashes, count in zip(whole, known, strict=True)
        ]
        for sequence in sequences:
            cache.take(sequence)
        assert [sequence.block_hashes for sequence in sequences] == whole
