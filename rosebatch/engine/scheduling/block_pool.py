"""Blocks of the paged KV cache: who holds them, which are free, which hold a known prefix. No torch.

A block without a holder keeps its contents and its place in the tree until it is handed out again. So the free list is
the prefix cache's eviction order.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

from rosebatch.engine.scheduling.free_blocks import FreeBlocks
from rosebatch.engine.scheduling.prefix_tree import PrefixTree


class BlockPool:
    """Reference-counted blocks, and a tree in which full ones are found by their tokens.

    Block ids are ``0 .. num_blocks - 1``. A block may be written only while it has one holder and cannot be found: one
    that is found can gain a second holder at any time.

    Attributes:
        window: keys that a query of its layers sees, its own included; 0 for all.
        num_free: blocks without a holder. Cached prefixes count.
        prefixes: the full blocks that can be found.
    """

    def __init__(self, num_blocks: int, block_size: int, window: int = 0) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.window = window
        self._ref_counts = [0] * num_blocks
        self.prefixes = PrefixTree(num_blocks, block_size)
        # Free blocks that cannot be found, or were never used: the last is handed out first. The others follow, in this
        # order.
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._cached = FreeBlocks()
        # A number of its own: it is read several times for each row.
        self.num_free = num_blocks

    def allocate(self, count: int) -> list[int]:
        """Hand out ``count`` blocks, each with one holder, least recently used first.

        Raises:
            ValueError: fewer than ``count`` are free; check ``num_free`` first.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks asked for, {self.num_free} free")
        blank, taken = self._blank, list[int]()
        self.num_free -= count
        if blank:
            first = max(0, len(blank) - count)
            taken = blank[first:][::-1]
            del blank[first:]
        if len(taken) < count:
            evicted = self._cached.pop(count - len(taken))
            self.prefixes.remove(evicted)
            taken += evicted
        counts = self._ref_counts
        for block in taken:
            counts[block] = 1
        return taken

    def share(self, blocks: Sequence[int]) -> None:
        """Add a holder to each block, taking it off the free list if it had none."""
        counts, free = self._ref_counts, list[int]()
        for block in blocks:
            if not (held := counts[block]):
                free.append(block)
            counts[block] = held + 1
        if free:
            # They were found in the tree.
            self._cached.remove(free)
            self.num_free -= len(free)

    def free(self, blocks: Sequence[int]) -> None:
        """Drop one holder of each block of a sequence, given in sequence order.

        The tail is evicted first: a hit needs an unbroken chain from the start.
        """
        counts, runs, blank = self._ref_counts, self.prefixes.runs, self._blank
        cached: list[int] = []
        still_held = 0
        for block in reversed(blocks):
            if (held := counts[block]) == 1:
                counts[block] = 0
                (blank if runs[block] is None else cached).append(block)
            else:
                assert held, f"block {block} freed more often than held"
                counts[block] = held - 1
                still_held += 1
        self._cached.extend(cached)
        self.num_free += len(blocks) - still_held

    def free_all(self) -> None:
        """Take all blocks from their holders, even if the counts of holders are wrong."""
        self._ref_counts, runs = [0] * self.num_blocks, self.prefixes.runs
        # The tail of a sequence mostly has higher numbers, and is evicted first.
        numbers = range(self.num_blocks - 1, -1, -1)
        known = (block for block in chain(self._cached, numbers) if runs[block] is not None)
        self._cached = FreeBlocks(dict.fromkeys(known))
        self._blank = [block for block in numbers if runs[block] is None]
        self.num_free = self.num_blocks

    def writable(self, block: int) -> bool:
        """Whether its holder may write into the block without a copy."""
        return self._ref_counts[block] == 1 and self.prefixes.runs[block] is None

    def check_integrity(self, holders: Iterable[Sequence[int]]) -> None:
        """Assert that counts, free list and tree agree with the block lists of all holders.

        Raises:
            AssertionError: they do not; the message names a block.
        """
        held = [0] * self.num_blocks
        for blocks in holders:
            for block in blocks:
                held[block] += 1
        for block, (count, holding) in enumerate(zip(self._ref_counts, held, strict=True)):
            assert count == holding, f"block {block}: {count} != {holding}"
        free = [*self._blank, *self._cached]
        assert len(set(free)) == len(free) == self.num_free, "a block is free twice"
        wrong = set(free) ^ {block for block, holding in enumerate(held) if holding == 0}
        assert not wrong, f"block {min(wrong)}: free list and holders disagree"
        self.prefixes.check_integrity()
