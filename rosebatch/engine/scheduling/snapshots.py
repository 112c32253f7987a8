"""Snapshots of states: what layers keep of a beginning, for the sequences that share it. No torch.

A sequence's states go on with each of its tokens, and no block holds them. So they are copied where sequences part: the
chunk that computes the beginning ends there, its states are saved after the step, and loaded before the first step of
each of the others. What waits is known: most snapshots are made where the next sequences part, and nowhere else. One is
made too where blocks of a prefix were found and no snapshot behind them.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain, islice

import numpy as np

from rosebatch.engine.scheduling.chunk_ends import ChunkEnds
from rosebatch.engine.scheduling.sequence import SequenceState

# Waiting sequences that are looked at, for where they part from the next one.
_LOOKED_AT = 32


class Snapshots:
    """Slots for states beside those of running sequences, and what is in them.

    A snapshot is found by the block in front of it, until that block is handed out again; one of forks, which may stand
    anywhere, by these alone. The least recently used one that no waiting sequence holds is overwritten.

    Args:
        count: of the slots.
        unit: tokens; a snapshot that is found stands at a multiple.
        ends: of chunks.

    Attributes:
        pending: slots that the plan in the making saves: no sequence of it can load them.
    """

    def __init__(self, count: int, unit: int, ends: ChunkEnds) -> None:
        self.pending: set[int] = set()
        self._count = count
        self._unit = unit
        self._ends = ends
        # The block in front of each, the least recently used first; None for those of forks alone.
        self._block_of: dict[int, int | None] = {}
        self._behind: dict[int, int] = {}
        self._holders: Counter[int] = Counter()
        self._free = list(range(count))

    @property
    def is_full(self) -> bool:
        """Whether waiting sequences hold all slots."""
        return self._open_slot() is None

    def hold(self, sequence: SequenceState, blocks: Sequence[int]) -> int:
        """Let a sequence begin with the longest snapshot behind its blocks; returns how many are in front of it."""
        for count in range(len(blocks) if self._behind else 0, 0, -1):
            if (slot := self._behind.get(blocks[count - 1])) is not None:
                self._hold(sequence, slot)
                return count
        return 0

    def plan_ends(self, sequence: SequenceState, found: int, behind: Iterable[SequenceState], *, forks: bool) -> None:
        """Decide where chunks of a sequence that is admitted end for a snapshot.

        Args:
            sequence: it has computed what its own snapshot stands for.
            found: so many of its first tokens are in blocks that were found.
            behind: the sequences that wait behind it.
            forks: whether its forks get a snapshot.
        """
        start, last, images = sequence.num_computed_tokens, sequence.num_prompt_tokens - 1, sequence.spec.images
        ends = {self._ends.longest(images, 0, last)} if forks and sequence.forks else set[int]()
        if sequence.num_cached_tokens is None:
            # Of one that is admitted again, the blocks are its own.
            ends.add(min(found, last) // self._unit * self._unit)
            for other in islice(behind, _LOOKED_AT):
                most = min(last, other.num_reusable_tokens, other.num_prompt_tokens - 1)
                common = min(_in_common(sequence, other), most) // self._unit * self._unit
                if common <= start:
                    break
                ends.add(common)
        sequence.snapshot_ends = sorted(
            end for end in ends if end > start and self._ends.longest(images, 0, end) == end
        )

    def save(self, block: int | None, forks: Sequence[SequenceState]) -> int | None:
        """A slot for states behind a block that can be found, or for forks, which then hold it.

        None if nothing is to be saved: the states are in a slot already, or all slots are held.
        """
        known = None if block is None else self._behind.get(block)
        slot = known
        if known is None and (slot := self._next_slot()) is not None:
            self._block_of[slot] = block
            if block is not None:
                self._behind[block] = slot
            self.pending.add(slot)
        if slot is not None and forks:
            for fork in forks:
                self._hold(fork, slot)
        return slot if known is None else None

    def load(self, sequence: SequenceState) -> int | None:
        """The slot with the states that an admitted sequence begins with; None if it begins with zeros."""
        slot = sequence.snapshot
        if slot is not None:
            self._block_of[slot] = self._block_of.pop(slot)
            self.drop(sequence)
        return slot

    def drop(self, sequence: SequenceState) -> None:
        """A sequence does without its snapshot, or has loaded it."""
        slot, sequence.snapshot = sequence.snapshot, None
        if slot is None:
            return
        self._holders[slot] -= 1
        if not self._holders[slot] and self._block_of[slot] is None:
            self._release(slot)

    def forget(self, blocks: Iterable[int]) -> None:
        """Blocks are handed out: what stands behind them is found no more."""
        for block in blocks if self._behind else ():
            if (slot := self._behind.pop(block, None)) is not None:
                self._block_of[slot] = None
                if not self._holders[slot]:
                    self._release(slot)

    def clear(self) -> None:
        """Forget all: perhaps the last plans were not computed."""
        self.pending.clear()
        self._block_of.clear()
        self._behind.clear()
        self._holders.clear()
        self._free = list(range(self._count))

    def check_integrity(self, sequences: Iterable[SequenceState]) -> None:
        """Assert that slots, blocks and the sequences that hold them agree."""
        held = Counter(sequence.snapshot for sequence in sequences if sequence.snapshot is not None)
        assert held == +self._holders, "sequences hold what they begin with"
        assert {block: slot for slot, block in self._block_of.items() if block is not None} == self._behind
        assert sorted([*self._free, *self._block_of]) == list(range(self._count)), "a slot is free or has states"
        assert all(self._holders[slot] for slot, block in self._block_of.items() if block is None)

    def _hold(self, sequence: SequenceState, slot: int) -> None:
        sequence.snapshot = slot
        self._holders[slot] += 1

    def _next_slot(self) -> int | None:
        if (slot := self._open_slot()) in self._free:
            self._free.remove(slot)
        elif slot is not None:
            block = self._block_of.pop(slot)
            assert block is not None, "nobody could find it"
            del self._behind[block]
        return slot

    def _open_slot(self) -> int | None:
        # Of this plan's, one may be free again: the plan saves into it all the same.
        order = (slot for slot in chain(self._free, self._block_of) if slot not in self.pending)
        return next((slot for slot in order if not self._holders[slot]), None)

    def _release(self, slot: int) -> None:
        del self._block_of[slot]
        self._free.append(slot)


def _in_common(first: SequenceState, second: SequenceState) -> int:
    """How many tokens both prompts begin with whose keys and states are the same."""
    if first.spec.salt != second.spec.salt:
        return 0
    count = min(first.num_prompt_tokens, second.num_prompt_tokens)
    one, other = (np.frombuffer(each.prompt, np.uint32, count) for each in (first, second))
    if len(parting := np.flatnonzero(one != other)):
        count = int(parting[0])
    images = first.spec.images, second.spec.images
    if not any(images):
        return count
    known = {image.offset: image.digest for image in images[0]}
    others = {image.offset: image.digest for image in images[1]}
    return min([count, *(offset for offset in known.keys() | others.keys() if known.get(offset) != others.get(offset))])
