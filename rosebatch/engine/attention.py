"""The attention of one step over the paged cache: what is the same for all layers is worked out once, here."""

from dataclasses import dataclass

import torch
from rosebatch_kernels.paged_attention.reference import gather, gather_rows
from torch import Tensor

from rosebatch.config import ModelConfig
from rosebatch.engine.batch import StepBatch
from rosebatch.engine.kv_cache import KVCache
from rosebatch.ops import Ops

# Keys gathered at a time for a group of decodes: what is gathered should still be in the CPU's cache when it is read.
_GROUP_BYTES = 2 << 20


@dataclass(frozen=True, slots=True)
class _DecodeGroup:
    """Decodes of like length, attended in one call, padded to the longest of them."""

    first: int
    count: int
    rows: Tensor
    masks: dict[int, Tensor]


@dataclass(frozen=True, slots=True)
class _Prefill:
    """One sequence's chunk, rows ``first .. first + length - 1`` of the step."""

    first: int
    length: int
    seq_len: int
    rows: Tensor | None
    masks: dict[int, Tensor | None]


class PagedAttention:
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
        self.dtype = cache.data.dtype
        self.windows = {config.sliding_window(layer) for layer in range(config.num_layers)}
        heads = torch.arange(cache.kv_heads, device=batch.slots.device)
        block, offset = batch.slots // cache.block_size, batch.slots % cache.block_size
        self.append_rows = (block[:, None] * cache.kv_heads + heads) * cache.block_size + offset[:, None]
        self.decodes = self._group_decodes(batch)
        self.prefills = self._list_prefills(batch)

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Append K and V of all sequences, then attend: a block filled in this step can be read in it."""
        cache = self.cache.layer(layer)
        window, scale = self.config.sliding_window(layer), self.config.attention_scale(layer)
        self.ops.kv_append(cache, k, v, self.append_rows)
        parts = [
            self.ops.attention_decode(
                q[group.first : group.first + group.count], cache, group.rows, group.masks[window], scale
            )
            for group in self.decodes
        ]
        for chunk in self.prefills:
            span = slice(chunk.first, chunk.first + chunk.length)
            if chunk.rows is None:
                keys, values = k[span].transpose(0, 1), v[span].transpose(0, 1)
            else:
                gathered = gather(cache, chunk.rows, 1)
                keys, values = (t[0, :, : chunk.seq_len] for t in gathered)
            parts.append(self.ops.attention_prefill(q[span], keys, values, chunk.masks[window], scale))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _group_decodes(self, batch: StepBatch) -> list[_DecodeGroup]:
        size = self.cache.block_size
        block_bytes = 2 * self.cache.kv_heads * size * self.config.head_dim * self.dtype.itemsize
        groups = []
        first, width = 0, 0
        for row in range(batch.num_decodes + 1):
            blocks = -(-batch.seq_lens[row] // size) if row < batch.num_decodes else 0
            full = max(width, blocks) * (row - first + 1) * block_bytes > _GROUP_BYTES
            if row > first and (row == batch.num_decodes or full):
                groups.append(self._decode_group(batch, first, row, width))
                first, width = row, 0
            width = max(width, blocks)
        return groups

    def _decode_group(self, batch: StepBatch, first: int, end: int, width: int) -> _DecodeGroup:
        table = batch.block_table[first:end, :width]
        rows = gather_rows(table, self.cache.num_blocks, self.cache.kv_heads)
        keys = torch.arange(width * self.cache.block_size, device=table.device)
        lengths = torch.tensor(batch.seq_lens[first:end], device=table.device)[:, None]
        masks = {}
        for window in self.windows:
            seen = keys < lengths
            if window:
                seen &= keys >= lengths - window
            mask = torch.zeros(seen.shape, dtype=self.dtype, device=table.device)
            masks[window] = mask.masked_fill_(~seen, float("-inf"))[:, None, None]
        return _DecodeGroup(first, end - first, rows, masks)

    def _list_prefills(self, batch: StepBatch) -> list[_Prefill]:
        chunks = []
        first = batch.num_decodes
        for index in range(batch.num_decodes, len(batch.seq_lens)):
            length, seq_len = batch.query_lens[index], batch.seq_lens[index]
            # Without a prefix, the chunk's own K and V are all there is: nothing to gather.
            whole = length == seq_len
            table = batch.block_table[index : index + 1, : -(-seq_len // self.cache.block_size)]
            rows = None if whole else gather_rows(table, self.cache.num_blocks, self.cache.kv_heads)
            masks = {w: None if whole and not w else self._causal(length, seq_len, w) for w in self.windows}
            chunks.append(_Prefill(first, length, seq_len, rows, masks))
            first += length
        return chunks

    def _causal(self, length: int, seq_len: int, window: int) -> Tensor:
        """``[length, seq_len]`` bool: keys up to the query's own position, and no further back than the window."""
        device = self.cache.data.device
        queries = torch.arange(seq_len - length, seq_len, device=device)[:, None]
        keys = torch.arange(seq_len, device=device)
        seen = keys <= queries
        return seen & (keys > queries - window) if window else seen
