"""Attention over gathered keys, with PyTorch's operators: what mixers get of a step, computed once for all layers.

Prompt tokens are attended in tiles of 64 successive positions, generated tokens one by one. The number of keys follows
from the token's position. So a token's attention is the same computation alone or in a batch, whatever the chunks, and
after a preemption: its bits depend on its own sequence only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from rosebatch.config.model import Planes
from rosebatch.core.images import PromptImage
from rosebatch.engine.cache.kv_cache import KVCache
from rosebatch.engine.cache.state_pool import StatePool
from rosebatch.engine.images import key_ends
from rosebatch.engine.torch_runner.batch import StepBatch
from rosebatch.model.mixers.mixer import MixerSpec, QueryTiles, WholePrompts
from rosebatch.model.rope import Rotary
from rosebatch.ops.ops import Ops, pack_chunks
from rosebatch_kernels.common.gather import gather_rows, padded_keys

_TILE = 64
# Maximum bytes of planes gathered at a time.
_GROUP_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class _Query:
    """One unit of work: a generated token, or a prompt's tokens within one tile.

    ``rows`` are its rows of the step, ``start`` is the position of the first of them. ``key_ends`` has the place after
    the last key that each row of the tile sees; None where that is the row's own.
    """

    sequence: int
    rows: range
    start: int
    generated: bool
    key_ends: tuple[int, ...] | None = None

    @property
    def tile_start(self) -> int:
        """Position of the first row that is computed: tiles are always whole."""
        return self.start if self.generated else self.start // _TILE * _TILE

    @property
    def tile_end(self) -> int:
        return self.tile_start + (1 if self.generated else _TILE)

    @property
    def num_keys(self) -> int:
        """Keys that are computed with."""
        return padded_keys(self.tile_end if self.key_ends is None else max(self.tile_end, *self.key_ends))


# What a layer reads of each sequence: its planes, and the sliding window.
_Read = tuple[tuple[Planes, ...], int]


@dataclass(frozen=True, slots=True)
class _Group:
    """Units of one shape, attended in one call: rows ``first .. first + count - 1`` of the permuted queries.

    ``tiles`` is by planes and sliding window.
    """

    first: int
    count: int
    tiles: dict["_Read", QueryTiles]


class TorchAttention:
    """One step; callable by the model, once a layer, see ``rosebatch.model.contract.Attention``.

    Args:
        batch: the step.
        cache: written and read.
        specs: of all layers with planes that will call this.
        ops: the operators of this run.
        states: continued; None for a model without them.
        sections: of rotary channels, see ``Rotary.of_rows``.
        everywhere: whether images' tokens see each other in layers without a window too.
    """

    def __init__(
        self,
        batch: StepBatch,
        cache: KVCache,
        specs: Sequence[MixerSpec],
        ops: Ops,
        states: StatePool | None = None,
        sections: Tensor | None = None,
        *,
        everywhere: bool = False,
    ) -> None:
        self._everywhere = everywhere
        self.cache = cache
        self.ops = ops
        self.device = cache.device
        # The cache group of the layers with each window.
        self.group_of = {spec.window: cache.group_of[spec.layer] for spec in specs}
        self.reads: set[_Read] = {(spec.planes, spec.window) for spec in specs}
        # The bytes of a token in the widest layer.
        widths = [sum(each.numbers for each in planes) for planes, _ in self.reads]
        self.token_bytes = cache.dtype.itemsize * max(widths, default=0)
        self._append_rows = {
            (planes, window): tuple(self._rows_of(batch.slots[self.group_of[window]], each.heads) for each in planes)
            for planes, window in self.reads
        }
        self.rotary_rows = batch.rotary_rows
        self._chunks = batch.chunks
        self._states = states
        self._sections = sections
        if states is not None:
            ends = accumulate(len(chunk.token_ids) for chunk in batch.chunks)
            rows = [
                (states.slots[chunk.id], end - len(chunk.token_ids), chunk.start, len(chunk.token_ids))
                for chunk, end in zip(batch.chunks, ends, strict=True)
            ]
            self.chunks = pack_chunks(rows, cache.device)
        self._rotations: dict[Rotary, tuple[Tensor, Tensor]] = {}
        self.groups: list[_Group] = []
        order: list[int] = []
        for queries in self._shapes(_queries(batch)) if specs else ():
            order += self._add_group(queries, batch, first=len(order))
        inverse = {row: position for position, row in enumerate(order) if row >= 0}
        ordered = not specs or order == list(range(len(batch.input_ids)))
        # Padding rows of a tile are filled with any query: their results are dropped.
        self.order = None if ordered else self._tensor([max(row, 0) for row in order])
        self.inverse = None if ordered else self._tensor([inverse[row] for row in range(len(inverse))])

    def prompts(self) -> WholePrompts:
        """See ``rosebatch.model.mixers.mixer.TorchContext``."""
        return self._prompts

    @cached_property
    def _prompts(self) -> WholePrompts:
        by_length: dict[int, list[int]] = {}
        order, first = [], 0
        for chunk in self._chunks:
            by_length.setdefault(len(chunk.token_ids), []).append(first)
            first += len(chunk.token_ids)
        for length, firsts in by_length.items():
            order += [row for first in firsts for row in range(first, first + length)]
        shapes = [(len(firsts), length) for length, firsts in by_length.items()]
        if order == list(range(len(order))):
            return WholePrompts(None, None, shapes)
        rows = self._tensor(order)
        return WholePrompts(rows, rows.argsort(), shapes)

    def __call__(self, spec: MixerSpec, *inputs: Tensor, wanted: Tensor | None = None) -> Tensor:
        """See ``rosebatch.model.contract.Attention``: tiles are always whole."""
        out = spec.torch_step(self, inputs)
        return out if wanted is None else out[wanted]

    def planes(self, spec: MixerSpec) -> tuple[Tensor, ...]:
        """See ``rosebatch.model.mixers.mixer.Step``."""
        return self.cache.layer(spec.layer)

    def states(self, spec: MixerSpec) -> tuple[Tensor, ...]:
        """See ``rosebatch.model.mixers.mixer.Step``."""
        assert self._states is not None, "the model has states"
        return self._states.layer(spec.layer)

    def rotation(self, rotary: Rotary | None) -> tuple[Tensor, Tensor] | None:
        """See ``rosebatch.model.mixers.mixer.TorchContext``."""
        if rotary is None:
            return None
        if rotary not in self._rotations:
            cos, sin = rotary.of_rows(self.rotary_rows, self._sections)
            self._rotations[rotary] = cos[:, None], sin[:, None]
        return self._rotations[rotary]

    def append_rows(self, spec: MixerSpec) -> tuple[Tensor, ...]:
        """See ``rosebatch.model.mixers.mixer.TorchContext``."""
        return self._append_rows[spec.planes, spec.window]

    def attend(self, spec: MixerSpec, q: Tensor, attend: Callable[[Tensor, QueryTiles], Tensor]) -> Tensor:
        """See ``rosebatch.model.mixers.mixer.TorchContext``."""
        read = spec.planes, spec.window
        if self.order is not None:
            q = q.index_select(0, self.order)
        parts = [attend(q[group.first : group.first + group.count], group.tiles[read]) for group in self.groups]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if self.inverse is None else out.index_select(0, self.inverse)

    def _rows_of(self, slots: Tensor, heads: int) -> Tensor:
        """Where each token's heads go in a plane with so many, see ``kv_append``."""
        size = self.cache.block_size
        numbers = torch.arange(heads, device=self.device)
        return (slots[:, None] // size * heads + numbers) * size + slots[:, None] % size

    def _shapes(self, queries: list[_Query]) -> list[list[_Query]]:
        """Units of one shape together, in parts that are not too large to gather."""
        shapes: dict[tuple[bool, int, tuple[int, ...] | None], list[_Query]] = {}
        for query in queries:
            shape = query.num_keys if query.generated else query.tile_start
            shapes.setdefault((query.generated, shape, query.key_ends), []).append(query)
        parts = []
        for members in shapes.values():
            limit = max(1, _GROUP_BYTES // (members[0].num_keys * self.token_bytes))
            parts += [members[i : i + limit] for i in range(0, len(members), limit)]
        return parts

    def _add_group(self, queries: list[_Query], batch: StepBatch, first: int) -> list[int]:
        """Add a group and return the step's rows in its order, -1 for the padding of a tile."""
        generated, keys = queries[0].generated, queries[0].num_keys
        order = []
        for query in queries:
            before = query.start - query.tile_start
            after = query.tile_end - query.start - len(query.rows)
            order += [-1] * before + list(query.rows) + [-1] * after
        width = -(-keys // self.cache.block_size)
        own = [query.sequence for query in queries]
        by_group = []
        for table in batch.block_tables:
            rows = table[own, :width]
            # Masked keys are read: a block of another sequence might hold NaN.
            by_group.append(torch.cat((rows, rows[:, -1:].expand(-1, width - rows.shape[1])), 1))
        tables = {w: self._within(queries, by_group[group], w) for w, group in self.group_of.items()}
        positions = self._positions(queries)
        ends = positions + 1 if queries[0].key_ends is None else self._tensor([*queries[0].key_ends])
        masks = {
            window: self._mask(positions, ends if window or self._everywhere else positions + 1, keys, window)
            for window in tables
        }
        if generated:
            masks = {window: mask[:, None, None] for window, mask in masks.items()}
        tiles = {}
        for planes, window in self.reads:
            blocks = self.cache.num_blocks[self.group_of[window]]
            each = tuple(gather_rows(tables[window], blocks, plane.heads, plane.number) for plane in planes)
            tiles[planes, window] = QueryTiles(generated, each, masks[window])
        self.groups.append(_Group(first, len(order), tiles))
        return order

    def _within(self, queries: list[_Query], table: Tensor, window: int) -> Tensor:
        """The table ``[B, M]`` with a block that the query sees in place of those before its window.

        Those may belong to others by now, and masked keys are read.
        """
        if not window:
            return table
        size = self.cache.block_size
        first, own = self._tensor(
            [[max(0, query.start + 1 - window) // size, query.start // size] for query in queries]
        ).T[:, :, None]
        return torch.where(torch.arange(table.shape[1], device=self.device) < first, table.gather(1, own), table)

    def _positions(self, queries: list[_Query]) -> Tensor:
        """Position of each generated token, or of the rows of the tile that all queries share."""
        if queries[0].generated:
            return self._tensor([query.start for query in queries])
        return torch.arange(queries[0].tile_start, queries[0].tile_end, device=self.device)

    def _mask(self, positions: Tensor, ends: Tensor, keys: int, window: int) -> Tensor:
        """``[R, keys]``: 0 for keys before the query's end and within its window, -inf for the rest."""
        key = torch.arange(keys, device=self.device)
        seen = key < ends[:, None]
        if window:
            seen &= key > positions[:, None] - window
        mask = torch.zeros(seen.shape, dtype=self.cache.dtype, device=self.device)
        return mask.masked_fill_(~seen, float("-inf"))

    def _tensor(self, values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, device=self.device)


def _key_ends(images: Sequence[PromptImage], start: int, end: int) -> tuple[int, ...] | None:
    """Those of a tile; None where no image is in it."""
    if not any(image.seen_begin < end and image.seen_end > start for image in images):
        return None
    return tuple(map(int, key_ends(images, start, end)))


def _queries(batch: StepBatch) -> list[_Query]:
    """Cut the step's chunks into units of work."""
    queries = []
    first = 0
    for sequence, chunk in enumerate(batch.chunks):
        position, num_prompt_tokens = chunk.start, batch.num_prompt_tokens[sequence]
        while position < chunk.end:
            generated = position >= num_prompt_tokens
            stop = position + 1
            if not generated:
                stop = min(chunk.end, num_prompt_tokens, (position // _TILE + 1) * _TILE)
            row = first + position - chunk.start
            query = _Query(sequence, range(row, row + stop - position), position, generated)
            if not generated and (images := batch.both_ways[sequence]):
                query = replace(query, key_ends=_key_ends(images, query.tile_start, query.tile_end))
            queries.append(query)
            position = stop
        first += len(chunk.token_ids)
    return queries
