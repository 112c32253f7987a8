"""Blocks found again by the hashes of their tokens: prompts with a common prefix share its K and V. No torch."""

from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from itertools import takewhile

from rosebatch.engine.plan import GONE
from rosebatch.engine.scheduling.block_group import BlockGroup, held_blocks
from rosebatch.engine.scheduling.block_hashes import HASH_BYTES, Before, BlockHashes
from rosebatch.engine.scheduling.block_tables import BlockTables
from rosebatch.engine.scheduling.sequence import SequenceState

# Tokens that are hashed together: what NumPy makes of them stays in the caches of the CPU.
_AT_ONCE = 1 << 13


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
        self._hasher = BlockHashes(blocks.block_size)
        # Of the last prompt: its salt, tokens, and the hashes of its full blocks.
        self._last: tuple[bytes, bytes, list[bytes]] = b"", b"", []
        # Blocks that it had in common with the one before.
        self._in_common = 0

    def look(self, sequences: Iterable[SequenceState]) -> None:
        """Hash the blocks of new prompts, many in a few calls. One with the beginning of the last has its hashes."""
        waiting = deque(sequences if self.enabled else ())
        while waiting:
            self._look_at_some(waiting)

    def _look_at_some(self, waiting: deque[SequenceState]) -> None:
        """Take the first of these out, and hash their blocks."""
        size, width = self.blocks.block_size, 4 * self.blocks.block_size
        salt, tokens, hashes = self._last
        # Of the full blocks of the last prompt: their hashes, or their places in what is hashed now.
        known: Sequence[bytes | int] = hashes
        looked: list[tuple[SequenceState, int, int, int]] = []
        parts: list[bytes] = []
        prefixes: list[tuple[int, int, Before]] = []
        stop = 0
        while waiting and stop * size < _AT_ONCE:
            sequence = waiting.popleft()
            if not (count := sequence.num_reusable_tokens // size):
                continue
            own, first = sequence.token_ids.tobytes(), 0
            of_prompt = self._common(sequence)
            if salt == sequence.spec.salt and own[:width] == tokens[:width]:
                first = self._begin_alike(tokens, own, min(count, of_prompt, len(known)))
            begin, stop = stop, stop + count - first
            if begin < stop:
                before = known[first - 1] if first else None
                if isinstance(before, bytes):
                    before = before[-HASH_BYTES:]
                prefixes.append((first, count - first, before))
                parts.append(own[first * width : count * width])
            looked.append((sequence, first, begin, stop))
            places: Sequence[bytes | int] = range(begin, stop)
            known = ([*known[:first], *places] if first else places)[:of_prompt]
            salt, tokens = sequence.spec.salt, own
        found = self._hasher.of_prefixes(b"".join(parts), prefixes) if parts else []
        for sequence, first, begin, stop in looked:
            # Prompts come in such an order that the next one mostly begins alike.
            sequence.block_hashes = hashes[:first] + self._named(sequence, first, found[begin:stop])
            hashes = sequence.block_hashes
        self._last = salt, tokens, hashes[: len(known)]

    def look_on(self, sequences: Sequence[tuple[SequenceState, int]]) -> None:
        """Hash the next block of each of these sequences that fills one up to so many tokens, all of them at once."""
        size = self.blocks.block_size
        behind = [(s, number) for s, end in sequences if (number := len(s.block_hashes)) < end // size]
        if not behind:
            return
        token_ids = array("I")
        for sequence, number in behind:
            token_ids += sequence.token_ids[number * size : (number + 1) * size]
        before = [_sums_of(sequence.block_hashes) for sequence, _ in behind]
        found = self._hasher.of_next(token_ids, [number for _, number in behind], before)
        for (sequence, number), own in zip(behind, found, strict=True):
            sequence.block_hashes += self._named(sequence, number, [own])

    def take(self, sequence: SequenceState) -> None:
        """Hold the blocks of the longest cached prefix, if any: its tokens are computed.

        A full group needs all of its blocks, a window group those that the next token sees. If a prompt is
        cached to its very end, its last token is recomputed in a copy of the last block. If that block is being
        computed in this very step, it is left out instead.
        """
        size, num_tokens = self.blocks.block_size, len(sequence.token_ids)
        reusable = sequence.num_reusable_tokens if self.enabled else 0
        # There may be more hashes.
        hashes = self._hashes(sequence, reusable // size)[: reusable // size]
        count = self._longest_prefix(num_tokens, hashes)
        count -= count % self.unit
        if not count:
            sequence.num_computed_tokens = 0
            sequence.tables = [[] for _ in self.blocks.groups]
            return
        sequence.num_computed_tokens = min(count * size, num_tokens - 1)
        sequence.tables = []
        for group in self.blocks.groups:
            first = group.first_seen(sequence.num_computed_tokens)
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
            table, pool = sequence.tables[group.number][first:stop], group.pool
            known = hashes
            if pool.window and GONE in table:
                known = [each for each, block in zip(hashes, table, strict=True) if block != GONE]
                table = held_blocks(table)
            if in_flight:
                # Before they can be found: an interrupt may come in between.
                group.in_flight.update(table)
            pool.register(table, known)

    def _hashes(self, sequence: SequenceState, count: int) -> list[bytes]:
        """Hashes of at least ``count`` of the sequence's first blocks, all of them full."""
        hashes, size = sequence.block_hashes, self.blocks.block_size
        known = len(hashes)
        if known < count:
            token_ids = sequence.token_ids[known * size : count * size].tobytes()
            found = self._hasher.of_prefixes(token_ids, [(known, count - known, _sums_of(hashes) or None)])
            hashes += self._named(sequence, known, found)
        return hashes

    def _begin_alike(self, last: bytes, tokens: bytes, most: int) -> int:
        """With how many equal blocks two prompts begin, up to so many. Mostly, as many as the last two."""
        width = 4 * self.blocks.block_size
        low, high, guesses = 0, most, [self._in_common + 1, self._in_common]
        while low < high:
            middle = guesses.pop() if guesses else (low + high + 1) // 2
            if not low < middle <= high:
                continue
            if last[low * width : middle * width] == tokens[low * width : middle * width]:
                low = middle
            else:
                high = middle - 1
        self._in_common = low
        return low

    def _common(self, sequence: SequenceState) -> int:
        """How many blocks of a sequence's prompt serve every prompt that begins so."""
        count = sequence.num_prompt_tokens // self.blocks.block_size
        return count - count % self.unit if self.exact else count

    def _named(self, sequence: SequenceState, first: int, hashes: list[bytes]) -> list[bytes]:
        """Hashes of a sequence's blocks from ``first`` on, with what else decides their keys in front of them."""
        salt, prompt = sequence.spec.salt, sequence.num_prompt_tokens
        whole = max(self._common(sequence) - first, 0) if self.exact else len(hashes)
        if not salt and whole >= len(hashes):
            return hashes
        # Behind another number of prompt tokens, generated ones were computed otherwise.
        generated = b"%b%d generated" % (salt, prompt)
        return [salt + each for each in hashes[:whole]] + [generated + each for each in hashes[whole:]]

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


def _sums_of(hashes: Sequence[bytes]) -> bytes:
    """The last of a sequence's hashes without what is in front of it; nothing if there is none."""
    return hashes[-1][-HASH_BYTES:] if hashes else b""


def _last_missing(group: BlockGroup, hashes: Sequence[bytes], position: int, count: int) -> int:
    """One more than the index of the last block that the token sees and the pool lacks; 0 if it lacks none."""
    for index in range(count, group.first_seen(position), -1):
        if hashes[index - 1] not in group.pool.by_hash:
            return index
    return 0
