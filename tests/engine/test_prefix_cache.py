"""Digests of a prompt's blocks, which it may take from the prompt before it."""

import random

from msgspec import structs

from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.block_tables import BlockTables
from rosebatch.engine.scheduling.prefix_cache import PrefixCache
from rosebatch.engine.scheduling.sequence import SequenceState
from tests.engine.fake_runner import make_sequence


def prompts_that_begin_alike(rng: random.Random, count: int) -> list[SequenceState]:
    """Each begins with some of the last one's tokens, and some have another salt or generated tokens."""
    tokens, sequences = [rng.randrange(9) for _ in range(12)], []
    for number in range(count):
        tokens = tokens[: rng.randrange(13)] + [rng.randrange(9) for _ in range(rng.randrange(1, 9))]
        sequence = make_sequence(tokens, id=number)
        sequence.restart(structs.replace(sequence.spec, salt=rng.choice((b"", b"", b"long"))))
        if rng.random() < 0.3:
            sequence.apply_token_ids([rng.randrange(9) for _ in range(rng.randrange(7))])
        sequences.append(sequence)
    return sequences


def digests(cache: PrefixCache, sequence: SequenceState) -> list[bytes]:
    sequence.block_hashes.clear()
    cache.take(sequence)
    return list(sequence.block_hashes)


def test_digests_are_the_same_behind_any_prompt():
    """Those of the last prompt are taken as far as it begins alike: one too many would give a row foreign K and V."""
    rng = random.Random(0)
    for exact in (False, True):

        def fresh(exact: bool = exact) -> PrefixCache:
            return PrefixCache(BlockTables([BlockPool(9, 3)]), enabled=True, exact=exact)

        cache = fresh()
        for sequence in prompts_that_begin_alike(rng, 300):
            assert digests(cache, sequence) == digests(fresh(), sequence)
