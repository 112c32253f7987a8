"""Block tables of sequences: one for each group of layers with the same sliding window. No torch.

Each group has a pool of blocks of its own. A window group gives blocks back when they leave the window. All tables of a
sequence have the same length: a block that was given back, or never taken, is ``GONE`` in its table.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

from rosebatch.engine.cache.windows import blocks_of_window
from rosebatch.engine.plan import GONE, BlockChange, BlockCopy
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.sequence import SequenceState


class _Group:
    """The blocks of one group, and what a plan has to know of them.

    Attributes:
        in_flight: blocks whose hash was registered for the step under way. They can be shared, since every layer writes
            K and V before it reads any. They cannot be copied yet, since copies run before the first layer.
        tainted: blocks that may hold NaN: zeroed when they are handed out again.
        copy_sources: held until the copy has run, or they could be handed out before.
    """

    def __init__(self, number: int, pool: BlockPool) -> None:
        self.number = number
        self.pool = pool
        self.in_flight: set[int] = set()
        self.tainted: set[int] = set()
        self.copy_sources: list[int] = []

    @property
    def max_seen(self) -> int:
        """Most blocks that hold the keys in front of a token, as far as its window goes."""
        return blocks_of_window(self.pool.window, self.pool.block_size)

    @property
    def recycles(self) -> bool:
        """Whether a sequence of any length can live in the pool: its window, a copy and one more block fit."""
        return self.pool.window > 0 and self.pool.num_blocks >= self.max_seen + 2

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
        self.pool.free(blocks)
        # A sampled token may never have seen these prompt tokens, so nobody checked that they are finite.
        prompt_blocks = -(-sequence.num_prompt_tokens // self.pool.block_size)
        self.tainted.update(blocks[: max(prompt_blocks - index, 0)])


class BlockGroups:
    """The block tables of all sequences, in all groups.

    Args:
        pools: one for each group, in the order of the groups' numbers; all with one block size.
    """

    def __init__(self, pools: Sequence[BlockPool]) -> None:
        assert len({pool.block_size for pool in pools}) == 1, "groups have one block size"
        self.pools = tuple(pools)
        self.block_size = pools[0].block_size
        self._groups = [_Group(number, pool) for number, pool in enumerate(pools)]
        self._no_copies = (False,) * len(pools)
        self._windows = [group for group in self._groups if group.pool.window]

    @property
    def num_blocks(self) -> int:
        """Blocks of all pools."""
        return sum(pool.num_blocks for pool in self.pools)

    @property
    def num_used(self) -> int:
        """Blocks with a holder."""
        return sum(pool.num_blocks - pool.num_free for pool in self.pools)

    def max_sequence_len(self, *, chunked: bool) -> int | None:
        """Most tokens of a sequence that has all pools for itself; None for no limit. Whole prompts must fit whole."""
        limits = [g.pool.num_blocks for g in self._groups if not (chunked and g.recycles)]
        return min(limits) * self.block_size if limits else None

    @property
    def longest_chunk(self) -> int | None:
        """Most tokens of a chunk, so that it fits pools which cannot hold a whole sequence; None for no limit."""
        limits = [g.pool.num_blocks - g.max_seen - 1 for g in self._windows if g.recycles]
        return min(limits) * self.block_size if limits else None

    def short_of(self, sequence: SequenceState, num_tokens: int) -> Sequence[int]:
        """For each group, blocks missing to hold ``num_tokens``, the copy of a block that may not be written included.

        Empty if no group lacks any: so it is for most rows of most steps.
        """
        held = len(sequence.tables[0]) if sequence.tables else 0
        first = sequence.num_computed_tokens // self.block_size
        copies: Sequence[int] = ()
        if first < held:
            for pool, table in zip(self.pools, sequence.tables):  # noqa: B905 (strict takes time)
                if not pool.writable(table[first]):
                    copies = self._must_copy(sequence)
                    break
        missing = -(-num_tokens // self.block_size) - held
        return copies if missing <= 0 else [missing + copy for copy in copies or self._no_copies]

    def _must_copy(self, sequence: SequenceState) -> Sequence[bool]:
        """For each group, whether the next token goes into a block that may not be written."""
        first = sequence.num_computed_tokens // self.block_size
        if first >= len(sequence.tables[0]):
            return self._no_copies
        return [not pool.writable(table[first]) for pool, table in zip(self.pools, sequence.tables, strict=True)]

    def has(self, needed: Iterable[int]) -> bool:
        """Whether so many blocks are free in each group; in none of them any, if that is empty."""
        for pool, count in zip(self.pools, needed):  # noqa: B905, SIM110 (strict and all take time)
            if count > pool.num_free:
                return False
        return True

    def has_room(self, sequence: SequenceState, num_tokens: int, end: int, spare: int) -> bool:
        """Whether the sequence fits with ``spare`` more blocks.

        A full group must hold all ``num_tokens``; a window group those up to the next chunk's ``end``, since blocks
        come back after it.
        """
        limit = -(-num_tokens // self.block_size) + 1 + spare
        if self.has([limit] * len(self.pools)):
            # So it is nearly always, and it takes less time to see.
            return True
        whole = self.short_of(sequence, num_tokens) or self._no_copies
        next_chunk = self.short_of(sequence, end) or self._no_copies
        counts = zip(self._groups, whole, next_chunk, strict=True)
        return self.has((chunk if group.recycles else all_) + spare for group, all_, chunk in counts)

    def cut(self, sequence: SequenceState, length: int) -> int:
        """At most ``length`` of its next tokens: so many that no window group is short of blocks, but at least one.

        Its own blocks come back after each chunk, so it need not wait for those of others.
        """
        for group in self._windows:
            held, free = len(sequence.tables[group.number]), group.pool.num_free
            room = (held + free) * self.block_size - sequence.num_computed_tokens
            length = min(length, max(room, 1))
        return length

    def reserve(
        self, sequence: SequenceState, num_tokens: int, wipes: list[tuple[int, int]], copies: list[BlockCopy]
    ) -> tuple[BlockChange, ...] | None:
        """Make all tokens from the first uncomputed one to ``num_tokens`` writable, in all groups or in none.

        A full last block needs a successor only, whoever else holds it (source: article S1). So the boundary step is
        the same code as every other, and a shared full block is never copied.

        Returns:
            the changes of the block tables, or None if there are too few free blocks. Wipes and copies are appended.
        """
        needed = self.short_of(sequence, num_tokens)
        if not needed:
            return ()
        if not self.has(needed):
            return None
        changes: list[BlockChange] = []
        copied = self._must_copy(sequence)
        for group, count, copy_first in zip(self._groups, needed, copied, strict=True):
            number, table = group.number, sequence.tables[group.number]
            blocks = group.pool.allocate(count)
            if group.tainted:
                wipes += [(number, block) for block in group.tainted.intersection(blocks)]
                group.tainted.difference_update(blocks)
            if copy_first:
                first = sequence.num_computed_tokens // self.block_size
                source, copy = table[first], blocks.pop()
                table[first] = copy
                changes.append((number, first, copy))
                copies.append((number, source, copy))
                group.copy_sources.append(source)
            changes += [(number, index, block) for index, block in enumerate(blocks, start=len(table))]
            table += blocks
        return tuple(changes)

    def whole(self, sequence: SequenceState) -> tuple[BlockChange, ...]:
        """All entries of its tables."""
        return tuple(
            (number, index, block) for number, table in enumerate(sequence.tables) for index, block in enumerate(table)
        )

    def take_prefix(self, sequence: SequenceState, hashes: Sequence[bytes]) -> int:
        """Hold the blocks of the longest beginning that is cached, if any; returns its number of blocks.

        A full group needs all of its blocks, a window group those that the next token sees. A prompt that is cached to
        its very end keeps the last block and recomputes one token in a copy of it. If that block is being computed in
        this very step, it is left out instead.
        """
        count = self._longest_prefix(len(sequence.token_ids), hashes)
        if not count:
            sequence.tables = [[] for _ in self.pools]
            return 0
        sequence.tables = []
        for group in self._groups:
            first = group.first_seen(min(count * self.block_size, len(sequence.token_ids) - 1))
            blocks = [group.pool.by_hash[block_hash] for block_hash in hashes[first:count]]
            group.pool.share(blocks)
            sequence.tables.append([GONE] * first + blocks)
        return count

    def _longest_prefix(self, num_tokens: int, hashes: Sequence[bytes]) -> int:
        count = len(hashes)
        for group in self._groups:
            if not group.pool.window:
                known = group.pool.by_hash
                count = next((i for i, block_hash in enumerate(hashes[:count]) if block_hash not in known), count)
        while count:
            whole = count * self.block_size == num_tokens
            if whole and any(g.pool.lookup(hashes[count - 1]) in g.in_flight for g in self._groups):
                count -= 1
                continue
            position = min(count * self.block_size, num_tokens - 1)
            missing = [self._last_missing(group, hashes, position, count) for group in self._windows]
            if not any(missing):
                break
            count = min(behind for behind in missing if behind) - 1
        return count

    @staticmethod
    def _last_missing(group: _Group, hashes: Sequence[bytes], position: int, count: int) -> int:
        """One more than the index of the last block that the token sees and the pool lacks; 0 if it lacks none."""
        for index in range(count, group.first_seen(position), -1):
            if hashes[index - 1] not in group.pool.by_hash:
                return index
        return 0

    def share(self, sequence: SequenceState, fork: SequenceState, num_tokens: int) -> None:
        """Let a fork hold the blocks of the first ``num_tokens`` as well."""
        count = -(-num_tokens // self.block_size)
        fork.tables = [table[:count] for table in sequence.tables]
        for pool, table in zip(self.pools, fork.tables, strict=True):
            pool.share(_held(table))

    def register(
        self, sequence: SequenceState, first: int, hashes: Sequence[bytes], *, in_flight: bool = False
    ) -> None:
        """Make full blocks findable, from the one with index ``first`` on, as far as they are not gone."""
        for group in self._groups:
            table, pool = sequence.tables[group.number], group.pool
            for index, block_hash in enumerate(hashes, start=first):
                block = table[index]
                if block != GONE and pool.register(block, block_hash) and in_flight:
                    group.in_flight.add(block)

    def release(self, *lists: Iterable[SequenceState]) -> None:
        """Free the blocks that the next token of each sequence does not see, right after its plan is made.

        The plan still reads them; only later plans can be handed these blocks, and the device works in their order.
        """
        if self._windows:
            for sequence in chain(*lists):
                for group in self._windows:
                    group.release(sequence)

    def free(self, sequence: SequenceState) -> None:
        """Give up all blocks of a sequence."""
        for pool, table in zip(self.pools, sequence.tables, strict=False):
            pool.free(_held(table) if pool.window else table)
        sequence.tables = []

    def taint(self, sequence: SequenceState) -> None:
        """Nobody else may find its K and V. They may hold NaN, which spreads from masked keys too."""
        for group, table in zip(self._groups, sequence.tables, strict=True):
            for block in _held(table):
                group.pool.forget(block)
            group.tainted.update(_held(table))

    def launched(self) -> None:
        """All plans so far have been launched. Their copies are safe, and the next plan can copy what they compute."""
        for group in self._groups:
            group.in_flight.clear()
            group.pool.free(group.copy_sources)
            group.copy_sources = []

    def forget_in_flight(self) -> None:
        """Nobody knows whether the step under way was computed: its blocks are no longer findable."""
        for group in self._groups:
            for block in group.in_flight:
                group.pool.forget(block)

    def check_integrity(self, sequences: Iterable[SequenceState]) -> None:
        """Assert that pools and tables agree; see ``BlockPool.check_integrity``."""
        tables = [sequence.tables for sequence in sequences if sequence.tables]
        assert all(len({len(table) for table in each}) == 1 for each in tables), "tables of one sequence are as long"
        for group in self._groups:
            own = [each[group.number] for each in tables]
            held = [_held(table) for table in own]
            assert all(table[len(table) - len(rest) :] == rest for table, rest in zip(own, held, strict=True))
            group.pool.check_integrity([*held, group.copy_sources])


def _held(table: Sequence[int]) -> list[int]:
    return [block for block in table if block != GONE]
