"""Blocks found again by their tokens: prompts with a common prefix share its K and V. No torch."""

from collections.abc import Sequence
from hashlib import sha256

import numpy as np

from rosebatch.engine.plan import GONE
from rosebatch.engine.scheduling.block_group import BlockGroup, held_blocks
from rosebatch.engine.scheduling.block_pool import BlockPool
from rosebatch.engine.scheduling.block_tables import BlockTables
from rosebatch.engine.scheduling.sequence import SequenceState


class PrefixCache:
    """Finds the blocks of a sequence's prefix, and makes full blocks findable.

    Args:
        blocks: the block tables in all groups of layers.
        enabled: False finds and registers nothing.
        exact: a block of generated tokens serves only sequences that generated them at the same positions. Prompt
            tokens are computed in other shapes than generated ones, which may change their last bits.
        unit: blocks of which prefixes are multiples: chunks behind them begin where those of a computed prompt do. With
            ``exact``, what a prompt has behind its last unit is computed in shapes that go by its end: it counts as
            generated.
    """

    def __init__(self, blocks: BlockTables, *, enabled: bool, exact: bool, unit: int = 1) -> None:
        self.blocks = blocks
        self.enabled = enabled
        self.exact = exact
        self.unit = unit
        # One group of layers without a window, of which any number of blocks may be held.
        self._is_plain = len(blocks.groups) == 1 and not blocks.window_groups and unit == 1

    def take(self, sequence: SequenceState) -> int:
        """Hold the blocks of the longest cached prefix, if any: its tokens are computed. Returns how many were found.

        Where sequences have states, it ends at a snapshot; further blocks may be found.

        A full group needs all of its blocks, a window group those that the next token sees. If a prompt is
        cached to its very end, its last token is recomputed in a copy of the last block. If that block is being
        computed in this very step, it is left out instead.
        """
        size = self.blocks.block_size
        snapshots = self.blocks.snapshots
        whole = sequence.num_reusable_tokens // size if self.enabled else 0
        if snapshots is not None:
            # A state cannot go back by a token.
            whole = min(whole, (sequence.num_known_tokens - 1) // size)
        count, found = 0, list[list[int]]()
        if whole:
            labels = self._labels(sequence, whole)
            for pool in self.blocks.pools:
                found.append(_found(pool, labels, sequence))
            count = self._longest_prefix(sequence.num_known_tokens, found) if any(found) else 0
        longest = count * size
        if snapshots is not None:
            count = snapshots.hold(sequence, found[0][:count]) if count else 0
        if not count:
            sequence.num_computed_tokens = 0
            sequence.tables = [[] for _ in self.blocks.groups]
            return longest
        sequence.num_computed_tokens = min(count * size, sequence.num_known_tokens - 1)
        if self._is_plain:
            sequence.tables = [found[0][:count]]
            self.blocks.pools[0].share(sequence.tables[0])
            return longest
        sequence.tables = []
        for group, own in zip(self.blocks.groups, found, strict=True):
            first = group.first_seen(sequence.num_computed_tokens)
            seen = own[first:count]
            group.pool.share(seen)
            sequence.tables.append([GONE] * first + seen)
        return longest

    def findable(self, sequence: SequenceState, count: int) -> int | None:
        """The last of the first ``count`` blocks of a sequence, as prompts find it; None if they do not."""
        if not self.enabled or not count:
            return None
        pool, own = self.blocks.pools[0], sequence.tables[0][count - 1]
        if pool.prefixes.runs[own] is not None:
            return own
        found = _found(pool, self._labels(sequence, count), sequence)
        return found[-1] if len(found) == count and found[-1] != GONE else None

    def register(self, sequence: SequenceState, start: int, end: int, *, in_flight: bool = False) -> None:
        """Make findable the blocks that tokens ``start .. end - 1`` fill, as far as they are not gone.

        ``in_flight`` if the next plan computes them.
        """
        first, stop = start // self.blocks.block_size, end // self.blocks.block_size
        if not self.enabled or first == stop:
            return
        labels = self._labels(sequence, stop)
        if self._is_plain and len(labels) == 1:
            # Nearly always, and quicker to do.
            group, whole = self.blocks.groups[0], sequence.tables[0]
            table = whole[first:stop]
            if in_flight:
                group.in_flight.append(table)
            before = whole[first - 1] if first else None
            group.pool.prefixes.add(labels[0][0], sequence.token_ids, first, table, before)
            return
        for group in self.blocks.groups:
            whole = sequence.tables[group.number]
            table, begin = whole[first:stop], 0
            if group.pool.window:
                table = held_blocks(table)
            if in_flight:
                # Before they can be found: an interrupt may come in between.
                group.in_flight.append(table)
            place = stop - len(table)
            for label, last in labels:
                if place < last:
                    before = whole[place - 1] if begin < place and whole[place - 1] != GONE else None
                    group.pool.prefixes.add(label, sequence.token_ids, place, table[: last - place], before)
                    place, table = last, table[last - place :]
                begin = last

    def _labels(self, sequence: SequenceState, count: int) -> Sequence[tuple[bytes, int]]:
        """What decides the keys of a sequence's first blocks besides their tokens, and up to which number it does."""
        label, images = sequence.spec.salt, sequence.spec.images
        if not images and not self.exact:
            # Nearly always, and quicker to tell.
            return ((label, count),)
        prompt, size, common = sequence.num_prompt_tokens, self.blocks.block_size, count
        if self.exact:
            common = min(prompt // size, count)
            common -= common % self.unit
        labels = []
        for image in images:
            # All images have the same tokens. A block has those that begin before its end.
            labels.append((label, 0 if image.whole_prompt else min(image.offset // size, common)))
            label = sha256(label + image.digest).digest()
        if images and images[0].whole_prompt:
            # Keys go by all that follows in the prompt, too.
            label = sha256(label + np.array(sequence.token_ids[:prompt], np.uint32).tobytes()).digest()
        labels.append((label, common))
        if common < count:
            # Behind another number of prompt tokens, generated ones were computed otherwise.
            labels.append((b"%b%d generated" % (label, prompt), count))
        return labels

    def _longest_prefix(self, num_tokens: int, found: Sequence[Sequence[int]]) -> int:
        """How many blocks, the first of ``num_tokens`` tokens, can be held in all groups, of those found in each."""
        size, groups = self.blocks.block_size, self.blocks.groups
        if self._is_plain and GONE not in found[0] and (count := len(found[0])) * size < num_tokens:
            # Nearly always, and quicker to tell.
            return count
        count = max(map(len, found))
        for group, own in zip(groups, found, strict=True):
            if not group.pool.window:
                count = min(count, own.index(GONE) if GONE in own else len(own))
        # Windows of a shorter prefix need other blocks.
        while count := count - count % self.unit:
            whole = count * size == num_tokens
            ends = [own[count - 1] if count <= len(own) else GONE for own in found]
            if whole and any(group.computes(end) for group, end in zip(groups, ends, strict=True)):
                count -= 1
                continue
            position = min(count * size, num_tokens - 1)
            windows = self.blocks.window_groups
            missing = [_last_missing(group, found[group.number], position, count) for group in windows]
            if not any(missing):
                break
            count = min(number for number in missing if number) - 1
        return count


def _found(pool: BlockPool, labels: Sequence[tuple[bytes, int]], sequence: SequenceState) -> list[int]:
    """The first blocks of a sequence, ``GONE`` for those that are missing; the last may be left out."""
    (label, last), *others = labels
    found = pool.prefixes.find(label, sequence.token_ids, last)
    for label, last in others:
        # Those of generated tokens follow those of the prompt.
        found += pool.prefixes.find(label, sequence.token_ids, last)[len(found) :]
    return found


def _last_missing(group: BlockGroup, found: Sequence[int], position: int, count: int) -> int:
    """One more than the index of the last block that the token sees and the pool lacks; 0 if it lacks none."""
    for index in range(count, group.first_seen(position), -1):
        if index > len(found) or found[index - 1] == GONE:
            return index
    return 0
