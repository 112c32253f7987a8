"""Block tables of sequences: one for each group of layers with the same sliding window. No torch.

Each group has a pool of blocks of its own. A window group gives blocks back when they leave the window. All tables of a
sequence have the same length: a block that was given back, or never taken, is ``GONE`` in its table.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

from rosebatch.engine.plan import BlockChange, BlockCopy
from rosebatch.engine.scheduling.block_group import BlockGroup, held_blocks
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.sequence import SequenceState
from rosebatch.engine.scheduling.snapshots import Snapshots


class BlockTables:
    """The block tables of all sequences, in all groups.

    Args:
        pools: one for each group, in the order of the groups' numbers; all with one block size. None if nothing is kept
            of tokens: then no sequence needs blocks.
        snapshots: of states; None if sequences have none, or share none.

    Attributes:
        groups: all of them.
        window_groups: those with a sliding window.
    """

    def __init__(self, pools: Sequence[BlockPool], snapshots: Snapshots | None = None) -> None:
        assert len({pool.block_size for pool in pools}) <= 1, "groups have one block size"
        assert snapshots is None or (len(pools) == 1 and not pools[0].window), "snapshots stand behind blocks"
        self.pools = tuple(pools)
        self.snapshots = snapshots
        self.block_size = pools[0].block_size if pools else 1
        self.groups = [BlockGroup(number, pool) for number, pool in enumerate(pools)]
        self._no_copies = (False,) * len(pools)
        self.window_groups = [group for group in self.groups if group.pool.window]

    @property
    def num_blocks(self) -> int:
        """Blocks of all pools."""
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def num_used(self) -> int:
        """Blocks with a holder."""
        return sum(pool.num_blocks - pool.num_free for pool in self.pools)

    def max_sequence_len(self, *, chunked: bool) -> int | None:
        """Most tokens of a sequence alone in all pools; None for no limit. Without chunks, prompts must fit whole."""
        limits = [g.pool.num_blocks for g in self.groups if not (chunked and g.recycles)]
        return min(limits) * self.block_size if limits else None

    @property
    def longest_chunk(self) -> int | None:
        """Most tokens of a chunk, so that it fits pools which cannot hold a whole sequence; None for no limit."""
        limits = [g.pool.num_blocks - g.max_seen - 1 for g in self.window_groups if g.recycles]
        return min(limits) * self.block_size if limits else None

    def short_of(self, sequence: SequenceState, num_tokens: int) -> Sequence[int]:
        """Blocks missing in each group to hold ``num_tokens``, with one for the copy of a block that is not writable.

        Empty if no group lacks any, as for most rows of most steps.
        """
        held = len(sequence.tables[0]) if sequence.tables else 0
        first = sequence.num_computed_tokens // self.block_size
        copies: Sequence[int] = ()
        if first < held:
            for pool, table in zip(self.pools, sequence.tables):  # noqa: B905 (strict takes time)
                if not pool.writable(table[first]):
                    copies = self._must_copy(sequence)
                    break
        missing = -(-num_tokens // self.block_size) - held if self.pools else 0
        if missing <= 0:
            return copies
        return [missing + copy for copy in copies] if copies else (missing,) * len(self.pools)

    def _must_copy(self, sequence: SequenceState) -> Sequence[bool]:
        """Whether the next token goes into a block that is not writable, in each group. It has a block there."""
        first = sequence.num_computed_tokens // self.block_size
        return [not pool.writable(table[first]) for pool, table in zip(self.pools, sequence.tables, strict=True)]

    def has(self, needed: Iterable[int]) -> bool:
        """Whether so many blocks are free in each group. If empty, none are needed."""
        for pool, count in zip(self.pools, needed):  # noqa: B905, SIM110 (strict and all take time)
            if count > pool.num_free:
                return False
        return True

    def has_room(self, sequence: SequenceState, num_tokens: int, end: int, spare: int) -> bool:
        """Whether the sequence fits with ``spare`` more blocks.

        A full group must hold all ``num_tokens``. A window group must hold those up to the next chunk's ``end``: blocks
        come back after it.
        """
        limit = -(-num_tokens // self.block_size) + 1 + spare
        for pool in self.pools:
            if limit > pool.num_free:
                break
        else:
            # Nearly always, and quicker to check.
            return True
        whole = self.short_of(sequence, num_tokens) or self._no_copies
        next_chunk = self.short_of(sequence, end) or self._no_copies
        counts = zip(self.groups, whole, next_chunk, strict=True)
        return self.has((chunk if group.recycles else all_) + spare for group, all_, chunk in counts)

    def cut(self, sequence: SequenceState, length: int) -> int:
        """How many of its next ``length`` tokens no window group is short of blocks for; at least one.

        Its own blocks come back after each chunk, so it need not wait for those of others.
        """
        for group in self.window_groups:
            held, free = len(sequence.tables[group.number]), group.pool.num_free
            room = (held + free) * self.block_size - sequence.num_computed_tokens
            length = min(length, max(room, 1))
        return length

    def reserve(
        self, sequence: SequenceState, num_tokens: int, wipes: list[tuple[int, int]], copies: list[BlockCopy]
    ) -> tuple[BlockChange, ...] | None:
        """Give tokens from the first uncomputed one to ``num_tokens`` writable slots, in all groups or in none.

        A full last block only needs a next one, whoever else holds it (source: article S1). So the boundary step is
        the same code as every other, and a shared full block is never copied.

        Returns:
            the changes of the block tables, or None if there are too few free blocks. Wipes and copies are appended.
        """
        needed = self.short_of(sequence, num_tokens)
        return self.take(sequence, num_tokens, needed, wipes, copies) if self.has(needed) else None

    def take(
        self,
        sequence: SequenceState,
        num_tokens: int,
        needed: Sequence[int],
        wipes: list[tuple[int, int]],
        copies: list[BlockCopy],
    ) -> tuple[BlockChange, ...]:
        """The same where it is known what the sequence is ``short_of``, and that so many blocks are free."""
        if not needed:
            return ()
        changes: list[BlockChange] = []
        missing = -(-num_tokens // self.block_size) - len(sequence.tables[0])
        for group, table, count in zip(self.groups, sequence.tables, needed):  # noqa: B905 (strict takes time)
            number, blocks = group.number, group.pool.allocate(count)
            if self.snapshots is not None:
                self.snapshots.forget(blocks)
            if group.tainted:
                wipes += [(number, block) for block in group.tainted.intersection(blocks)]
                group.tainted.difference_update(blocks)
            if count > missing and count:
                # One more than the new tokens need: the block that they begin in is copied.
                first = sequence.num_computed_tokens // self.block_size
                source, copy = table[first], blocks.pop()
                table[first] = copy
                changes.append((number, first, (copy,)))
                copies.append((number, source, copy))
                group.copy_sources.append(source)
            if blocks:
                changes.append((number, len(table), tuple(blocks)))
                table += blocks
        return tuple(changes)

    def entries(self, sequence: SequenceState) -> tuple[BlockChange, ...]:
        """All entries of its tables."""
        return tuple([(number, 0, tuple(table)) for number, table in enumerate(sequence.tables) if table])

    def share(self, sequence: SequenceState, fork: SequenceState, num_tokens: int) -> None:
        """Let a fork hold the blocks of the first ``num_tokens`` as well."""
        count = -(-num_tokens // self.block_size)
        fork.tables = [table[:count] for table in sequence.tables]
        for pool, table in zip(self.pools, fork.tables, strict=True):
            pool.share(held_blocks(table))

    def release(self, *lists: Iterable[SequenceState]) -> None:
        """Free the blocks that the next token of each sequence does not see, right after their plan is made.

        The plan still reads them; only later plans can be handed these blocks, and the device works in their order.
        """
        if self.window_groups:
            for sequence in chain(*lists):
                for group in self.window_groups:
                    group.release(sequence)

    def free(self, sequence: SequenceState) -> None:
        """Give up all blocks of a sequence. Its tokens are then not computed."""
        for pool, table in zip(self.pools, sequence.tables, strict=False):
            pool.free(held_blocks(table) if pool.window else table)
        sequence.tables = []
        sequence.num_computed_tokens = 0
        if self.snapshots is not None:
            self.snapshots.drop(sequence)

    def taint(self, sequence: SequenceState) -> None:
        """Make its K and V unfindable. They may hold NaN, which spreads from masked keys too."""
        for group, table in zip(self.groups, sequence.tables, strict=True):
            held = held_blocks(table)
            group.pool.prefixes.remove(held[::-1])
            group.tainted.update(held)

    def doubt(self, sequence: SequenceState) -> None:
        """Before its blocks are given up early: perhaps no sampled token has seen K and V that it made."""
        for group, table in zip(self.groups, sequence.tables, strict=False):
            group.tainted.update(held_blocks(table))

    def mark_launched(self) -> None:
        """Note that all plans so far are launched: their copies are safe, and later plans can copy their blocks."""
        for group in self.groups:
            group.in_flight.clear()
            if group.copy_sources:
                group.pool.free(group.copy_sources)
                group.copy_sources = []

    def free_all(self) -> None:
        """Give up the blocks of all sequences, also where an interrupt came between the changes of a step."""
        for group in self.groups:
            group.in_flight.clear()
            group.pool.free_all()
            group.copy_sources = []
        if self.snapshots is not None:
            self.snapshots.clear()

    def forget_in_flight(self) -> None:
        """Make blocks of the step under way unfindable: perhaps it was not computed, or not planned to its end."""
        for group in self.groups:
            group.pool.prefixes.mend()
            group.pool.prefixes.remove([*chain(*group.in_flight)])

    def check_integrity(self, sequences: Iterable[SequenceState]) -> None:
        """Assert that pools and tables agree; see ``BlockPool.check_integrity``."""
        tables = [sequence.tables for sequence in sequences if sequence.tables]
        assert all(len({len(table) for table in each}) == 1 for each in tables), (
            "all block tables of a sequence have the same length"
        )
        for group in self.groups:
            own = [each[group.number] for each in tables]
            held = [held_blocks(table) for table in own]
            assert all(table[len(table) - len(rest) :] == rest for table, rest in zip(own, held, strict=True))
            group.pool.check_integrity([*held, group.copy_sources])
