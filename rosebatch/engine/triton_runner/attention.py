"""Attention by kernels that read K and V in their blocks: one class for packed chunks, one for decode steps."""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rosebatch.config import ModelConfig
from rosebatch.engine.kv_cache import KVCache
from rosebatch.engine.triton_runner.state import DeviceState
from rosebatch.model.layers import Rotary
from rosebatch.ops import DeviceOps, Gate, Ops
from rosebatch.toggles import Toggles
from rosebatch_kernels.feedback import layout
from rosebatch_kernels.kv_cache.layout import cache_rows


@dataclass(frozen=True, slots=True)
class AttentionContext:
    """What all steps of a run share."""

    config: ModelConfig
    cache: KVCache
    state: DeviceState
    ops: Ops
    kernels: DeviceOps
    toggles: Toggles

    def heads(self, qkv: Tensor, positions: Tensor, rotary: Rotary | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, normed and rotated by separate operators: the way of ``--no-fused-rotary``."""
        turned = None if rotary is None else (rotary.cos[positions][:, None], rotary.sin[positions][:, None])
        norm = None if rotary is None else rotary.qk_norm
        return self.ops.split_heads(qkv, self.config.num_heads, self.config.num_kv_heads, turned, norm)


def _kernel_arguments(rotary: Rotary | None) -> dict[str, object]:
    if rotary is None:
        return {}
    return {"rotary": (rotary.cos, rotary.sin), "qk_norm": rotary.qk_norm}


class PackedAttention:
    """Attention of one step over packed chunks (see ``rosebatch.model.layers.Attention``).

    Args:
        context: of the run.
        rows, positions: ``[T]`` int32, each token's row of the block table, -1 for padding, and position.
        tiles: ``[N, 4]`` int32, see ``rosebatch_kernels.paged_attention.prefill``.
    """

    def __init__(self, context: AttentionContext, rows: Tensor, positions: Tensor, tiles: Tensor) -> None:
        self.context = context
        self.rows = rows
        self.positions = positions
        self.tiles = tiles
        self._append_rows: Tensor | None = None

    def __call__(self, layer: int, qkv: Tensor, rotary: Rotary | None, gate: Gate | None = None) -> Tensor:
        """K and V of all chunks are written before any is read."""
        context = self.context
        cache, table = context.cache.layer(layer), context.state.block_table
        heads = context.config.num_heads
        if context.toggles.fused_rotary:
            arguments = _kernel_arguments(rotary)
            context.kernels.prepare(qkv, cache, table, self.rows, self.positions, num_heads=heads, **arguments)
            q = qkv
        else:
            split, k, v = context.heads(qkv, self.positions, rotary)
            if self._append_rows is None:
                self._append_rows = _append_rows(cache, table, self.rows, self.positions)
            context.ops.kv_append(cache, k, v, self._append_rows)
            q = split.reshape(len(qkv), -1)
        scale, window = context.config.attention_scale(layer), context.config.sliding_window(layer)
        if gate is None:
            return context.kernels.prefill(q, cache, table, self.tiles, num_heads=heads, scale=scale, window=window)
        return context.kernels.gated_prefill(q, cache, table, self.tiles, gate, num_heads=heads, scale=scale)


class DecodeAttention:
    """Attention of a decode step over the first ``size`` rows of the state; nothing in it depends on the host.

    Args:
        context: of the run.
        size: rows, those that are not live included.
    """

    def __init__(self, context: AttentionContext, size: int) -> None:
        state = context.state
        self.context = context
        self.positions = state.fields[layout.POSITION, :size]
        self.limits = state.fields[layout.LIMIT, :size]
        self.table = state.block_table[:size]
        self._rows: Tensor | None = None
        self._append_rows: Tensor | None = None

    def __call__(self, layer: int, qkv: Tensor, rotary: Rotary | None, gate: Gate | None = None) -> Tensor:
        """The kernel does all of it, or what its switches leave it."""
        context, toggles = self.context, self.context.toggles
        cache = context.cache.layer(layer)
        arguments: dict[str, object] = {}
        if not toggles.fused_rotary and rotary is not None:
            q, k, v = context.heads(qkv, self.positions, rotary)
            if toggles.fused_kv_append:
                qkv = torch.cat((q, k, v), 1).view(len(qkv), -1)
            else:
                context.ops.kv_append(cache, k, v, self._rows_to_append(cache))
                qkv = q.reshape(len(qkv), -1)
        elif toggles.fused_kv_append:
            arguments = _kernel_arguments(rotary)
        elif toggles.fused_rotary and rotary is not None:
            context.kernels.prepare(
                qkv,
                cache,
                self.table,
                self._live_rows(),
                self.positions,
                num_heads=context.config.num_heads,
                **_kernel_arguments(rotary),
            )
        else:
            _, k, v = context.heads(qkv, self.positions, None)
            context.ops.kv_append(cache, k, v, self._rows_to_append(cache))
        decode = partial(context.kernels.decode, window=context.config.sliding_window(layer))
        if gate is not None:
            decode = partial(context.kernels.gated_decode, gate=gate, sparse=toggles.sparse_values)
        return decode(
            qkv,
            cache,
            self.table,
            self.positions,
            self.limits,
            num_heads=context.config.num_heads,
            scale=context.config.attention_scale(layer),
            append=toggles.fused_kv_append,
            **arguments,
        )

    def _live_rows(self) -> Tensor:
        """``[size]`` int32: each row's number, -1 where it is not live."""
        if self._rows is None:
            numbers = torch.arange(len(self.positions), dtype=torch.int32, device=self.positions.device)
            self._rows = torch.where(self.positions < self.limits, numbers, -1)
        return self._rows

    def _rows_to_append(self, cache: Tensor) -> Tensor:
        if self._append_rows is None:
            self._append_rows = _append_rows(cache, self.table, self._live_rows(), self.positions)
        return self._append_rows


def _append_rows(cache: Tensor, table: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """See ``cache_rows``; tokens of row -1 are written to the cache's last block, which no sequence has."""
    _, blocks, kv_heads, block_size, _ = cache.shape
    there = cache_rows(table, rows.clamp_min(0), positions, kv_heads, block_size)
    heads = torch.arange(kv_heads, device=there.device)
    unused = ((blocks - 1) * kv_heads + heads) * block_size
    return torch.where(rows[:, None] >= 0, there, unused)
