"""Attention over gathered keys, with PyTorch's operators: what is the same for all layers of a step is done once.

Prompt tokens are attended in tiles of 64 successive positions, generated tokens one by one, each with a number of
keys that follows from its position. So a token's attention is the same computation alone or in a batch, whatever
the chunks, and after a preemption: its bits depend on its own sequence only.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from rosebatch.config import ModelConfig
from rosebatch.engine.kv_cache import KVCache
from rosebatch.engine.torch_runner.batch import StepBatch
from rosebatch.model.layers import Rotary
from rosebatch.ops import Gate, Ops
from rosebatch_kernels.common.gather import gather_rows, padded_keys

_TILE = 64
# Most bytes of K and V gathered at a time.
_GROUP_BYTES = 32 << 20


@dataclass(frozen=True, slots=True)
class _Query:
    """One unit of work: a generated token, or a prompt's tokens within one tile.

    ``rows`` are its rows of the step, ``start`` is the position of the first of them.
    """

    sequence: int
    rows: range
    start: int
    generated: bool

    @property
    def tile_start(self) -> int:
        """Position of the first row that is computed: tiles are always whole."""
        return self.start if self.generated else self.start // _TILE * _TILE

    @property
    def tile_end(self) -> int:
        return self.tile_start + (1 if self.generated else _TILE)


@dataclass(frozen=True, slots=True)
class _Group:
    """Units of one shape, attended in one call: rows ``first .. first + count - 1`` of the permuted queries."""

    first: int
    count: int
    generated: bool
    cache_rows: Tensor
    masks: dict[int, Tensor]


class GatheredAttention:
    """Attention for one step; callable by the model, once a layer (see ``rosebatch.model.layers.Attention``).

    Args:
        batch: the step.
        cache: written and read.
        config: heads, scales and sliding windows.
        ops: the operators of this run.
    """

    def __init__(self, batch: StepBatch, cache: KVCache, config: ModelConfig, ops: Ops) -> None:
        self.cache = cache
        self.config = config
        self.ops = ops
        self.device = cache.data.device
        self.windows = {config.sliding_window(layer) for layer in range(config.num_layers)}
        heads = torch.arange(cache.kv_heads, device=self.device)
        block, offset = batch.slots // cache.block_size, batch.slots % cache.block_size
        self.append_rows = (block[:, None] * cache.kv_heads + heads) * cache.block_size + offset[:, None]
        self.positions = batch.positions
        self._turned: tuple[Tensor, Tensor] | None = None
        self.groups: list[_Group] = []
        order: list[int] = []
        for queries in self._shapes(_queries(batch)):
            order += self._add_group(queries, batch, first=len(order))
        inverse = {row: position for position, row in enumerate(order) if row >= 0}
        ordered = order == list(range(len(batch.input_ids)))
        # Padding rows of a tile are filled with any query: their results are dropped.
        self.order = None if ordered else self._tensor([max(row, 0) for row in order])
        self.inverse = None if ordered else self._tensor([inverse[row] for row in range(len(inverse))])

    def __call__(self, layer: int, qkv: Tensor, rotary: Rotary | None, gate: Gate | None = None) -> Tensor:
        """Append K and V of all sequences, then attend: a block filled in this step can be read in it."""
        cache = self.cache.layer(layer)
        q, k, v = self._heads(qkv, rotary)
        window, scale = self.config.sliding_window(layer), self.config.attention_scale(layer)
        self.ops.kv_append(cache, k, v, self.append_rows)
        if self.order is not None:
            q = q.index_select(0, self.order)
        parts = []
        for group in self.groups:
            rows = q[group.first : group.first + group.count]
            parts.append(self._attend(group, rows, cache, group.masks[window], scale, gate))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        return out if self.inverse is None else out.index_select(0, self.inverse)

    def _attend(self, group: _Group, q: Tensor, cache: Tensor, mask: Tensor, scale: float, gate: Gate | None) -> Tensor:
        ops, rows = self.ops, group.cache_rows
        if gate is None:
            attend = ops.gathered_decode if group.generated else ops.gathered_prefill
            return attend(q, cache, rows, mask, scale)
        gated = ops.gathered_gated_decode if group.generated else ops.gathered_gated_prefill
        return gated(q, cache, rows, mask, scale, gate)

    def _heads(self, qkv: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        heads, kv_heads = self.config.num_heads, self.config.num_kv_heads
        if rotary is None:
            return self.ops.split_heads(qkv, heads, kv_heads)
        if self._turned is None:
            # The tables are the same for all layers.
            self._turned = rotary.cos[self.positions][:, None], rotary.sin[self.positions][:, None]
        return self.ops.split_heads(qkv, heads, kv_heads, self._turned, rotary.qk_norm)

    def _shapes(self, queries: list[_Query]) -> list[list[_Query]]:
        """Units of one shape together, in parts that are not too large to gather."""
        shapes: dict[tuple[bool, int], list[_Query]] = {}
        for query in queries:
            shape = padded_keys(query.tile_end) if query.generated else query.tile_start
            shapes.setdefault((query.generated, shape), []).append(query)
        parts = []
        key_bytes = 2 * self.cache.kv_heads * self.config.head_dim * self.cache.data.dtype.itemsize
        for members in shapes.values():
            most = max(1, _GROUP_BYTES // (padded_keys(members[0].tile_end) * key_bytes))
            parts += [members[i : i + most] for i in range(0, len(members), most)]
        return parts

    def _add_group(self, queries: list[_Query], batch: StepBatch, first: int) -> list[int]:
        """Add a group and return the step's rows in its order, -1 for the padding of a tile."""
        generated, keys = queries[0].generated, padded_keys(queries[0].tile_end)
        order = []
        for query in queries:
            before = query.start - query.tile_start
            after = query.tile_end - query.start - len(query.rows)
            order += [-1] * before + list(query.rows) + [-1] * after
        width = -(-keys // self.cache.block_size)
        table = batch.block_table[[query.sequence for query in queries], :width]
        table = functional.pad(table, (0, width - table.shape[1]))
        cache_rows = gather_rows(table, self.cache.num_blocks, self.cache.kv_heads)
        positions = self._positions(queries)
        masks = {window: self._mask(positions, keys, window) for window in self.windows}
        if generated:
            masks = {window: mask[:, None, None] for window, mask in masks.items()}
        self.groups.append(_Group(first, len(order), generated, cache_rows, masks))
        return order

    def _positions(self, queries: list[_Query]) -> Tensor:
        """Position of each generated token, or of the rows of the tile that all queries share."""
        if queries[0].generated:
            return self._tensor([query.start for query in queries])
        return torch.arange(queries[0].tile_start, queries[0].tile_end, device=self.device)

    def _mask(self, positions: Tensor, keys: int, window: int) -> Tensor:
        """``[R, keys]``: 0 for keys up to the query's position and within its window, -inf for the rest."""
        key = torch.arange(keys, device=self.device)
        seen = key <= positions[:, None]
        if window:
            seen &= key > positions[:, None] - window
        mask = torch.zeros(seen.shape, dtype=self.cache.data.dtype, device=self.device)
        return mask.masked_fill_(~seen, float("-inf"))

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.device)


def _queries(batch: StepBatch) -> list[_Query]:
    """Cut the step's chunks into units of work."""
    queries = []
    first = 0
    for sequence, chunk in enumerate(batch.chunks):
        end = chunk.start + chunk.length
        position = chunk.start
        while position < end:
            generated = position >= chunk.sequence.num_prompt_tokens
            stop = position + 1
            if not generated:
                stop = min(end, chunk.sequence.num_prompt_tokens, (position // _TILE + 1) * _TILE)
            row = first + position - chunk.start
            queries.append(_Query(sequence, range(row, row + stop - position), position, generated))
            position = stop
        first += chunk.length
    return queries
