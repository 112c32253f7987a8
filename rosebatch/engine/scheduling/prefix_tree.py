"""Which blocks hold the K and V of which tokens: a tree of prefixes, one entry for a run of blocks. No torch."""

from array import array
from collections.abc import Iterator, Sequence

import msgspec

from rosebatch.engine.plan import GONE


class Run(msgspec.Struct, eq=False, gc=False):
    """Successive blocks of a prefix, up to where others go on otherwise.

    Python's search for cycles leaves them out: with one for each prompt in the cache, it took a twentieth of a row.

    Attributes:
        parent: the run before it; None for the root, which has no blocks.
        key: by which the parent has it.
        tokens: of its blocks, 32 bits each.
        length: how many blocks these fill.
        blocks: that hold their K and V; ``GONE`` for none. The last one is there, so there may be fewer.
        children: those that follow, by the tokens of their first block.
    """

    parent: "Run | None"
    key: bytes
    tokens: bytes
    length: int
    blocks: list[int] = []
    children: dict[bytes, "Run"] = {}


# A run, how many blocks are before it, and how many of its own a prefix has.
_Part = tuple[Run, int, int]


class PrefixTree:
    """Finds blocks by all tokens up to their ends: a radix tree (the idea: SGLang's RadixAttention, arXiv 2312.07104).

    Tokens themselves are compared, so two prefixes are never taken for each other. It takes a prompt few steps of
    Python, however many blocks it has.

    Args:
        num_blocks: of the pool.
        block_size: tokens of a block.

    Attributes:
        runs: of each block of the pool, where it is; None for one that cannot be found.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.runs: list[Run | None] = [None] * num_blocks
        self._block_size, self._width = block_size, 4 * block_size
        self._root = Run(None, b"", b"", 0)

    def __del__(self) -> None:
        # Parents and children hold each other, and no search finds them.
        for run in list(self._all()):
            run.parent = None

    def find(self, label: bytes, token_ids: "array[int]", count: int) -> list[int]:
        """The first ``count`` blocks of a prefix, ``GONE`` for those that are missing; the last may be left out.

        Prefixes with different labels have nothing in common.
        """
        found: list[int] = []
        for run, _, own in self._walk(label, token_ids, count)[0]:
            blocks = run.blocks[:own]
            found += blocks
            if len(blocks) < own:
                found += [GONE] * (own - len(blocks))
        return found

    def add(
        self, label: bytes, token_ids: "array[int]", first: int, blocks: list[int], before: int | None = None
    ) -> None:
        """Make the blocks of a prefix from number ``first`` on findable, except where another block is.

        ``before`` is the block in front of these under the same label; None if it is not known.
        """
        stop, size = first + len(blocks), self._block_size
        run = None if before is None else self.runs[before]
        if run is not None and len(run.blocks) == run.length and run.blocks[-1] == before:
            # A look for the run would compare all tokens before these, with each block that generated tokens fill.
            key = token_ids[first * size : (first + 1) * size].tobytes() if run.children else b""
            if key not in run.children:
                rest = memoryview(token_ids)[first * size : stop * size].tobytes()
                if key:
                    # As behind an instruction that many prompts have.
                    run.children[key] = run = Run(run, key, rest, stop - first)
                else:
                    run.tokens, run.length = run.tokens + rest, run.length + len(blocks)
                self._fill(run, len(run.blocks), blocks)
                return
        parts, key = self._walk(label, token_ids, stop)
        run, begin, own = parts[-1] if parts else (self._root, 0, 0)
        if (end := begin + own) < stop:
            if own < run.length:
                run = self._split(run, own)
                parts[-1] = run, begin, own
            rest = memoryview(token_ids)[end * size : stop * size].tobytes()
            if run is self._root or run.children:
                added = Run(run, key or rest[: self._width], rest, stop - end)
                run.children[added.key] = added
                parts.append((added, end, stop - end))
            else:
                run.tokens, run.length = run.tokens + rest, stop - begin
                parts[-1] = run, begin, stop - begin
        for run, begin, own in parts:
            if begin + own > first:
                place = max(first - begin, 0)
                self._fill(run, place, blocks[begin + place - first : begin + own - first])

    def remove(self, blocks: Sequence[int]) -> None:
        """Make blocks no longer findable. Those of a run from its last on, as sequences free them, take least time."""
        runs, start = self.runs, 0
        while start < len(blocks):
            if (run := runs[blocks[start]]) is None:
                start += 1
                continue
            own = run.blocks
            count = min(len(own), len(blocks) - start)
            taken = blocks[start : start + count]
            if taken == own[: -count - 1 : -1]:
                del own[-count:]
            else:
                taken = taken[:1]
                own[own.index(taken[0])] = GONE
            for block in taken:
                runs[block] = None
            start += len(taken)
            if not own or own[-1] == GONE:
                _strip(own)
                self._prune(run)

    def mend(self) -> None:
        """Have ``runs`` as the tree says, also where an interrupt came between two changes."""
        self.runs[:] = [None] * len(self.runs)
        for run in list(self._all()):
            for block in run.blocks:
                if block != GONE:
                    self.runs[block] = run
            _strip(run.blocks)
            self._prune(run)

    def check_integrity(self) -> None:
        """Assert that tree and blocks agree.

        Raises:
            AssertionError: they do not.
        """
        found: list[Run | None] = [None] * len(self.runs)
        for run in self._all():
            assert run.parent is not None and run.parent.children[run.key] is run
            assert run.key.endswith(run.tokens[: self._width]), "a run is found by its first block"
            assert run.blocks or run.children, "a run without blocks is left"
            assert not run.blocks or run.blocks[-1] != GONE
            assert len(run.blocks) <= run.length == len(run.tokens) // self._width
            for block in run.blocks:
                if block != GONE:
                    assert found[block] is None, f"block {block} is at two places"
                    found[block] = run
        for block, (known, right) in enumerate(zip(self.runs, found, strict=True)):
            assert known is right, f"block {block}: its place is stale"

    def _walk(self, label: bytes, token_ids: "array[int]", count: int) -> tuple[list[_Part], bytes]:
        """The runs that a prefix of so many blocks has in the tree, and the key that the last one lacks, if it does."""
        size, run, begin = self._block_size, self._root, 0
        parts: list[_Part] = []
        while begin < count:
            # For one block, this takes half as long as a view of all.
            key = token_ids[begin * size : (begin + 1) * size].tobytes()
            if not begin and label:
                key = label + key
            child = run.children.get(key)
            if child is None:
                return parts, key
            run, own = child, min(child.length, count - begin)
            # The tokens are not copied.
            tokens = memoryview(token_ids)[begin * size : (begin + own) * size]
            if not run.tokens.startswith(tokens):
                own = self._in_common(run.tokens, tokens)
            parts.append((run, begin, own))
            if own < run.length:
                break
            begin += own
        return parts, b""

    def _in_common(self, run: bytes, tokens: memoryview) -> int:
        """With how many equal blocks both begin: at least one, and not all of these tokens."""
        size = self._block_size
        low, high = 1, len(tokens) // size - 1
        while low < high:
            middle = (low + high + 1) // 2
            if run.startswith(tokens[: middle * size]):
                low = middle
            else:
                high = middle - 1
        return low

    def _split(self, run: Run, count: int) -> Run:
        """Divide a run behind so many blocks; returns the first part."""
        cut, parent = count * self._width, run.parent
        assert parent is not None, "it is not the root"
        first = Run(parent, run.key, run.tokens[:cut], count, run.blocks[:count])
        _strip(first.blocks)
        rest, key = run.tokens[cut:], run.tokens[cut : cut + self._width]
        first.children[key] = run
        # No call is between these, where an interrupt could come.
        parent.children[run.key] = first
        run.parent, run.key, run.tokens, run.length, run.blocks = (
            first,
            key,
            rest,
            run.length - count,
            run.blocks[count:],
        )
        for block in first.blocks:
            if block != GONE:
                self.runs[block] = first
        self._prune(run)
        return first

    def _fill(self, run: Run, place: int, blocks: list[int]) -> None:
        """Put blocks into a run from a place on, except where others are."""
        own, runs = run.blocks, self.runs
        if place < len(own):
            inside = blocks[: len(own) - place]
            blocks = blocks[len(inside) :]
            for number, block in enumerate(inside, place):
                if own[number] == GONE:
                    runs[block], own[number] = run, block
        elif place > len(own):
            own += [GONE] * (place - len(own))
        for block in blocks:
            assert runs[block] is None, f"block {block} registered twice"
            runs[block] = run
        own += blocks

    def _prune(self, run: Run) -> None:
        """Take out a run that has nothing, and those before it that have nothing else."""
        while run.parent is not None and not run.blocks and not run.children:
            del run.parent.children[run.key]
            run = run.parent

    def _all(self) -> Iterator[Run]:
        """All runs but the root."""
        left = [self._root]
        while left:
            below = left.pop().children.values()
            yield from below
            left += below


def _strip(blocks: list[int]) -> None:
    """Drop the last ones as far as they are gone."""
    while blocks and blocks[-1] == GONE:
        blocks.pop()
