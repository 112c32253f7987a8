"""Blocks found again by the digests of their tokens: prompts with a common prefix share its K and V. No torch."""

from array import array
from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from rosebatch.engine.plan import GONE
from rosebatch.engine.scheduling.block_group import BlockGroup
from rosebatch.engine.scheduling.block_pool import hash_block, token_bytes
from rosebatch.engine.scheduling.block_tables import BlockTables
from rosebatch.engine.scheduling.sequence import SequenceState


class PrefixCache:
    """Finds the blocks of a sequence's prefix, and makes full blocks findable.

    Args:
        blocks: the block tables in all groups of layers.
        enabled: False finds and registers nothing.
        exact: a block of generated tokens serves only sequences that generated them at the same positions. Prompt
            tokens are computed in other shapes than generated ones, which may change their last bits.
    """

    def __init__(self, blocks: BlockTables, *, enabled: bool, exact: bool) -> None:
        self.blocks = blocks
        self.enabled = enabled
        self.exact = exact
        # Of the last prompt: its salt, tokens, and the hashes of its full blocks.
        self._last: tuple[bytes, array[int], list[bytes]] = b"", array("I"), []

    def look(self, sequence: SequenceState) -> None:
        """Hash the blocks of a new prompt, whose tokens were just written: later, they are in no cache of the CPU."""
        if self.enabled and (count := sequence.num_reusable_tokens // self.blocks.block_size):
            self._hashes(sequence, count)
            self._keep(sequence)

    def take(self, sequence: SequenceState) -> None:
        """Hold the blocks of the longest cached prefix, if any: its tokens are computed.

        A full group needs all of its blocks, a window group those that the next token sees. If a prompt is
        cached to its very end, its last token is recomputed in a copy of the last block. If that block is being
        computed in this very step, it is left out instead.
        """
        size, num_tokens = self.blocks.block_size, len(sequence.token_ids)
        reusable = sequence.num_reusable_tokens if self.enabled else 0
        # At least those to which the digests are known.
        hashes = self._hashes(sequence, reusable // size)[: reusable // size]
        count = self._longest_prefix(num_tokens, hashes)
        sequence.num_computed_tokens = min(count * size, num_tokens - 1)
        sequence.tables = []
        for group in self.blocks.groups:
            first = group.first_seen(sequence.num_computed_tokens) if count else 0
            found = list(map(group.pool.by_hash.__getitem__, hashes[first:count]))
            group.pool.share(found)
            sequence.tables.append([GONE] * first + found)

    def register(self, sequence: SequenceState, start: int, end: int, *, in_flight: bool = False) -> None:
        """Make findable the blocks that tokens ``start .. end - 1`` fill, as far as they are not gone.

        ``in_flight`` if the next plan computes them.
        """
        first, stop = start // self.blocks.block_size, end // self.blocks.block_size
        if not self.enabled or first == stop:
            return
        hashes = self._hashes(sequence, stop)[first:stop]
        for group in self.blocks.groups:
            table, pool = sequence.tables[group.number], group.pool
            for index, block_hash in enumerate(hashes, start=first):
                block = table[index]
                if block == GONE:
                    continue
                if in_flight:
                    # Before it can be found: an interrupt may come in between.
                    group.in_flight.add(block)
                pool.register(block, block_hash)

    def _hashes(self, sequence: SequenceState, count: int) -> list[bytes]:
        """Hashes of at least ``count`` of the sequence's first blocks, all of them full."""
        hashes, size = sequence.block_hashes, self.blocks.block_size
        if count and not hashes:
            hashes += self._hashes_in_common(sequence, count)
        known = len(hashes)
        if known < count:
            parent = hashes[-1] if hashes else sequence.spec.salt
            blocks = token_bytes(sequence.token_ids[known * size : count * size], size)
            for index, tokens in enumerate(blocks, start=known):
                if self.exact and index == sequence.num_prompt_tokens // size:
                    # The first block with generated tokens.
                    parent += b"%d generated" % sequence.num_prompt_tokens
                parent = hash_block(parent, tokens)
                hashes.append(parent)
        return hashes

    def _keep(self, sequence: SequenceState) -> None:
        """Let the next sequence have the hashes of this prompt."""
        size = self.blocks.block_size
        count = sequence.num_prompt_tokens // size
        self._last = sequence.spec.salt, sequence.token_ids, sequence.block_hashes[:count]

    def _hashes_in_common(self, sequence: SequenceState, count: int) -> list[bytes]:
        """The hashes of up to ``count`` blocks with which the last prompt begins too: prompts come in such an order."""
        salt, tokens, hashes = self._last
        size = self.blocks.block_size
        # Blocks of generated tokens may have other hashes.
        count = min(count, sequence.num_prompt_tokens // size, len(hashes))
        if not count or salt != sequence.spec.salt:
            return []
        length = count * size
        differs = np.frombuffer(tokens, np.uint32, length) != np.frombuffer(sequence.token_ids, np.uint32, length)
        first = int(differs.argmax())
        return hashes[: first // size if differs[first] else count]

    def _longest_prefix(self, num_tokens: int, hashes: Sequence[bytes]) -> int:
        """How many of these blocks, the first of ``num_tokens`` tokens, can be held in all groups."""
        size, count = self.blocks.block_size, len(hashes)
        for group in self.blocks.groups:
            if not group.pool.window:
                known = group.pool.by_hash
                count = len(list(takewhile(known.__contains__, hashes[:count])))
        while count:
            whole = count * size == num_tokens
            if whole and any(g.pool.lookup(hashes[count - 1]) in g.in_flight for g in self.blocks.groups):
                count -= 1
                continue
            position = min(count * size, num_tokens - 1)
            missing = [_last_missing(group, hashes, position, count) for group in self.blocks.window_groups]
            if not any(missing):
                break
            count = min(number for number in missing if number) - 1
        return count


def _last_missing(group: BlockGroup, hashes: Sequence[bytes], position: int, count: int) -> int:
    """One more than the index of the last block that the token sees and the pool lacks; 0 if it lacks none."""
    for index in range(count, group.first_seen(position), -1):
        if hashes[index - 1] not in group.pool.by_hash:
            return index
    return 0
