"""The KV cache blocks of layers with the same sliding window. No torch."""

from collections.abc import Sequence

from rosebatch.engine.cache.windows import blocks_of_window
from rosebatch.engine.plan import GONE
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.sequence import SequenceState


class BlockGroup:
    """The pool of one group of layers, and which of its blocks need care.

    Args:
        number: the group's place among all.
        pool: its blocks.

    Attributes:
        in_flight: blocks that were made findable for the step under way, those of each chunk. They can be shared, since
            every layer writes K and V before it reads any. They cannot be copied yet, since copies run before the first
            layer.
        tainted: blocks that may hold NaN. They are zeroed when they are handed out again.
        copy_sources: held until the copy has run. Otherwise they could be handed out before.
    """

    def __init__(self, number: int, pool: BlockPool) -> None:
        self.number = number
        self.pool = pool
        self.in_flight: list[list[int]] = []
        self.tainted: set[int] = set()
        self.copy_sources: list[int] = []

    @property
    def max_seen(self) -> int:
        """Most blocks that hold the keys before a token, within its window."""
        return blocks_of_window(self.pool.window, self.pool.block_size)

    @property
    def recycles(self) -> bool:
        """Whether the pool can hold a sequence of any length: its window, a copy and one more block fit."""
        return self.pool.window > 0 and self.pool.num_blocks >= self.max_seen + 2

    def computes(self, block: int) -> bool:
        """Whether the block is among those ``in_flight``."""
        return any(block in blocks for blocks in self.in_flight)

    def first_seen(self, position: int) -> int:
        """Index of the first block with a key that the token at ``position`` sees."""
        first = position + 1 - self.pool.window
        return first // self.pool.block_size if self.pool.window and first > 0 else 0

    def release(self, sequence: SequenceState) -> None:
        """Free the blocks that the sequence's next token does not see any more."""
        table, first = sequence.tables[self.number], self.first_seen(sequence.num_settled_tokens)
        index = first
        while index and table[index - 1] != GONE:
            index -= 1
        if index == first:
            return
        blocks = table[index:first]
        table[index:first] = [GONE] * len(blocks)
        # Perhaps no sampled token has seen these prompt tokens, so they were not checked to be finite.
        prompt_blocks = -(-sequence.num_prompt_tokens // self.pool.block_size)
        self.tainted.update(blocks[: max(prompt_blocks - index, 0)])
        self.pool.free(blocks)


def held_blocks(table: Sequence[int]) -> list[int]:
    """The blocks of a table that are not gone."""
    return [block for block in table if block != GONE]
