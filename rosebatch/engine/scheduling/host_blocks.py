"""Blocks of the host's memory, where K and V of preempted sequences wait. No torch."""

from collections.abc import Iterable

from rosebatch.engine.plan import HostCopy
from rosebatch.engine.scheduling.sequence import SequenceState


class HostBlocks:
    """Which of them are free. A preempted sequence that finds too few is computed again.

    Args:
        num_blocks: 0 saves nothing. Each holds what a block of the only group of layers does.
        block_size: tokens of a block.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        # The last is handed out first, so that few are ever used: the runner allocates a block at its first use.
        self._free = list(range(num_blocks - 1, -1, -1))

    def save(self, sequence: SequenceState) -> list[HostCopy]:
        """Take blocks for the computed tokens of a sequence that decodes: what to copy, before it loses its own."""
        count = -(-sequence.num_computed_tokens // self.block_size)
        if not sequence.decoding or count > len(self._free):
            return []
        sequence.saved_blocks = [self._free.pop() for _ in range(count)]
        sequence.num_saved_tokens = sequence.num_computed_tokens
        return list(zip(sequence.block_ids, sequence.saved_blocks, strict=False))

    def restore(self, sequence: SequenceState) -> list[HostCopy]:
        """Give the blocks of a sequence back that has its own again: what to copy, behind the prefix that it found."""
        saved, found = sequence.saved_blocks, sequence.num_computed_tokens
        first = found // self.block_size if found < sequence.num_saved_tokens else len(saved)
        sequence.num_computed_tokens = max(found, sequence.num_saved_tokens)
        self._free += reversed(saved)
        sequence.saved_blocks, sequence.num_saved_tokens = [], 0
        return list(zip(sequence.block_ids[first:], saved[first:], strict=False))

    def free_all(self) -> None:
        """Take all blocks from their holders, which are dropped."""
        self._free = list(range(self.num_blocks - 1, -1, -1))

    def check_integrity(self, sequences: Iterable[SequenceState]) -> None:
        """Assert that each block is free or held by one sequence."""
        held = [block for sequence in sequences for block in sequence.saved_blocks]
        assert sorted([*held, *self._free]) == list(range(self.num_blocks)), "a block is lost, or held twice"
