"""Attention by kernels that read K and V in their blocks: one class for packed chunks, one for decode steps.

``rosebatch.ops.attention`` has chosen the kernels. ``SharedAttention`` adds what they leave to do before them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from rosebatch.engine.cache.kv_cache import KVCache
from rosebatch.engine.cache.state_pool import StatePool
from rosebatch.engine.triton_runner.packing import PackedInputs
from rosebatch.engine.triton_runner.state import DeviceState
from rosebatch.model.mixers.delta.spec import StateSpec
from rosebatch.model.mixers.softmax.spec import AttentionSpec
from rosebatch.ops.attention import DeviceOps
from rosebatch.ops.ops import DeltaState, Heads, Ops
from rosebatch_kernels.common.shared_keys import SharedKeys
from rosebatch_kernels.feedback import layout
from rosebatch_kernels.kv_cache.layout import cache_rows


class _Step(Protocol):
    """What preparing q, k and v needs to know of a step."""

    @property
    def shared(self) -> "SharedAttention":
        """What all steps of the run share."""
        ...

    def table(self, layer: int) -> Tensor:
        """``[S, M]`` int32 block ids in this layer's group."""
        ...

    @property
    def positions(self) -> Tensor:
        """``[T]`` int32 of each token."""
        ...

    @property
    def rotary_rows(self) -> Tensor | None:
        """``[T]`` int32, each token's row of the rotary tables; None if it is the position."""
        ...

    def rows(self) -> Tensor:
        """``[T]`` int32, each token's row of the table; -1 for tokens that nobody reads."""
        ...

    def append_rows(self, layer: int) -> Tensor:
        """Where each token's K and V go, see ``kv_append``."""
        ...


# Takes the projection ``[T, (heads + 2 · kv_heads) · D]``; returns the first argument of the attention kernel.
_Prepare = Callable[[AttentionSpec, Tensor, Tensor, _Step], Tensor]


@dataclass(frozen=True, slots=True)
class SharedAttention:
    """What all steps of a run share.

    Attributes:
        prepare_packed: norms, rotates and appends before prefill.
        prepare_decode: what the decode kernel leaves to do before it.
        states: of the layers with states; None for a model without them.
    """

    cache: KVCache
    state: DeviceState
    ops: Ops
    kernels: DeviceOps
    prepare_packed: _Prepare
    prepare_decode: _Prepare
    states: StatePool | None = None

    @classmethod
    def of(
        cls, cache: KVCache, state: DeviceState, ops: Ops, kernels: DeviceOps, states: StatePool | None = None
    ) -> "SharedAttention":
        """With the steps before attention that these kernels need."""
        packed = _prepare_apart if kernels.prepare is None else partial(_prepare_in_one, kernels.prepare)
        decode: _Prepare = packed
        if kernels.decode_appends:
            decode = _leave_to_kernel if kernels.decode_rotates else _rotate_apart
        return cls(cache, state, ops, kernels, packed, decode, states)

    def layer_states(self, spec: StateSpec) -> DeltaState:
        """The states of a layer."""
        assert self.states is not None, "the model has states"
        return DeltaState(*self.states.layer(spec.layer))

    def heads(self, spec: AttentionSpec, qkv: Tensor, step: _Step) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v, normed and rotated by separate operators: the way of ``--no-fused-rotary``."""
        rotary, rows = spec.rotary, step.positions if step.rotary_rows is None else step.rotary_rows
        turned = None if rotary is None else (rotary.cos[rows][:, None], rotary.sin[rows][:, None])
        return self.ops.split_heads(qkv, spec.num_heads, spec.num_kv_heads, turned, spec.qk_norm)


def _leave_to_kernel(spec: AttentionSpec, qkv: Tensor, cache: Tensor, step: _Step) -> Tensor:
    return qkv


def _rotate_apart(spec: AttentionSpec, qkv: Tensor, cache: Tensor, step: _Step) -> Tensor:
    """Norm and rotate by separate operators; the decode kernel appends."""
    if spec.rotary is None and spec.qk_norm is None:
        return qkv
    return torch.cat(step.shared.heads(spec, qkv, step), 1).view(len(qkv), -1)


def _prepare_in_one(
    kernel: Callable[..., None], spec: AttentionSpec, qkv: Tensor, cache: Tensor, step: _Step
) -> Tensor:
    """Norm, rotate and append by one kernel, q in place."""
    options = {"num_heads": spec.num_heads, "rotary_rows": step.rotary_rows, **_rotation(spec)}
    kernel(qkv, cache, step.table(spec.layer), step.rows(), step.positions, **options)
    return qkv


def _prepare_apart(spec: AttentionSpec, qkv: Tensor, cache: Tensor, step: _Step) -> Tensor:
    """Norm, rotate and append by separate operators."""
    q, k, v = step.shared.heads(spec, qkv, step)
    step.shared.ops.kv_append(cache, k, v, step.append_rows(spec.layer))
    return qkv if spec.rotary is None and spec.qk_norm is None else q.reshape(len(qkv), -1)


def _normed(spec: AttentionSpec, qkv: Tensor, kernels: DeviceOps) -> tuple[AttentionSpec, Tensor]:
    """q and k normed by kernels of their own, and a layer that norms no more: where no other kernel norms them."""
    if spec.qk_norm is None or not kernels.norms_apart(spec.qk_norm):
        return spec, qkv
    qkv = kernels.norm_heads(qkv, spec.num_heads, spec.num_kv_heads, spec.qk_norm)
    return replace(spec, qk_norm=None), qkv


def _rotation(spec: AttentionSpec) -> dict[str, Any]:
    rotary = None if spec.rotary is None else (spec.rotary.cos, spec.rotary.sin)
    return {"rotary": rotary, "qk_norm": spec.qk_norm}


def _softmax(spec: AttentionSpec) -> dict[str, Any]:
    return {"window": spec.window, "soft_cap": spec.soft_cap, "sinks": spec.sinks}


def sharing_heads(specs: Sequence[AttentionSpec]) -> Heads | None:
    """The heads of the first layer whose rows can share keys, see ``DecodeAttention``; None if there is none."""
    return next((spec.heads for spec in specs if not spec.window), None)


def can_group_tiles(specs: Sequence[AttentionSpec]) -> bool:
    """Whether chunks of several sequences may share a tile: no layer has a window or a gate."""
    return all(not spec.window and spec.gate is None for spec in specs)


class PackedAttention:
    """Attention of one step over packed chunks (see ``rosebatch.model.layers.Attention``).

    Args:
        shared: by all steps of the run.
        inputs: of the step.
    """

    def __init__(self, shared: SharedAttention, inputs: PackedInputs) -> None:
        self.shared = shared
        self.tables = shared.state.block_tables
        self.positions = inputs.positions
        self.rotary_rows = inputs.rotary_rows
        self.tiles = inputs.tiles
        self.last_tiles = inputs.last_tiles
        self.pieces = inputs.pieces
        self.packed = inputs.packed
        self._rows = inputs.rows
        self._append_rows: dict[tuple[int, int], Tensor] = {}

    def __call__(self, spec: AttentionSpec, qkv: Tensor) -> Tensor:
        """K and V of all chunks are written before any is read."""
        return self._attend(spec, qkv, self.tiles)

    def of_rows(self, spec: AttentionSpec, qkv: Tensor, wanted: Tensor) -> Tensor:
        """See ``rosebatch.model.layers.Attention``; ``wanted`` are the last rows. Each has a tile of its own."""
        # Tiles that chunks share are faster.
        tiles = self.tiles if len(self.pieces) else self.last_tiles
        return self._attend(spec, qkv, tiles)[wanted]

    def _attend(self, spec: AttentionSpec, qkv: Tensor, tiles: Tensor) -> Tensor:
        """``[T, heads · D]``; only rows of these tiles are computed."""
        kernels = self.shared.kernels
        (cache,) = self.shared.cache.layer(spec.layer)
        spec, qkv = _normed(spec, qkv, kernels)
        q = self.shared.prepare_packed(spec, qkv, cache, self)
        heads, scale, table = spec.num_heads, spec.scale, self.table(spec.layer)
        if spec.gate is None:
            options = _softmax(spec)
            if len(self.pieces):
                del options["window"]
                shared = tiles, self.pieces
                return kernels.prefill_shared(q, cache, table, *shared, num_heads=heads, scale=scale, **options)
            return kernels.prefill(q, cache, table, tiles, num_heads=heads, scale=scale, **options)
        return kernels.gated_prefill(q, cache, table, tiles, spec.gate, num_heads=heads, scale=scale)

    def delta(self, spec: StateSpec, qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """See ``rosebatch.model.layers.Attention``."""
        states = self.shared.layer_states(spec)
        return self.shared.ops.delta_rule(qkv, a, b, states, self.packed, spec.weights)

    def rows(self) -> Tensor:
        """See ``_Step``."""
        return self._rows

    def table(self, layer: int) -> Tensor:
        """See ``_Step``."""
        return self.tables[self.shared.cache.group_of[layer]]

    def append_rows(self, layer: int) -> Tensor:
        """See ``_Step``; once for all layers of a group with the same number of K/V heads."""
        (cache,) = self.shared.cache.layer(layer)
        kind = self.shared.cache.group_of[layer], cache.shape[2]
        if kind not in self._append_rows:
            self._append_rows[kind] = _append_rows(cache, self.table(layer), self._rows, self.positions)
        return self._append_rows[kind]


class DecodeAttention:
    """Attention of a decode step over the first ``size`` rows of the state; nothing in it depends on the host.

    Args:
        shared: by all steps of the run.
        size: rows, those that are not live included.
        keys: that rows share; None if there are none.
        divided: whether any row may have more keys than ``DeviceOps.undivided_keys``, shared ones left out.
    """

    def __init__(
        self, shared: SharedAttention, size: int, keys: SharedKeys | None = None, *, divided: bool = True
    ) -> None:
        state = shared.state
        self.shared = shared
        self.keys = keys
        self.divided = divided
        self.positions = state.fields[layout.POSITION, :size]
        # See ``RestartPolicy.rotary_rows``.
        self.rotary_rows = None
        self.limits = state.fields[layout.LIMIT, :size]
        self.state_slots = state.fields[layout.STATE, :size]
        self.tables = state.block_tables[:, :size]
        self._rows: Tensor | None = None
        self._append_rows: dict[tuple[int, int], Tensor] = {}

    def __call__(self, spec: AttentionSpec, qkv: Tensor) -> Tensor:
        """The kernel does all of it, or attends to what was prepared."""
        kernels = self.shared.kernels
        (cache,) = self.shared.cache.layer(spec.layer)
        spec, qkv = _normed(spec, qkv, kernels)
        qkv = self.shared.prepare_decode(spec, qkv, cache, self)
        # A key leaves the windows of rows at different times.
        keys = None if spec.window else self.keys
        divided = self.divided
        if keys is not self.keys:
            # That tells of the keys behind the shared ones. Here a row has all keys of its window.
            divided = spec.window > kernels.undivided_keys(len(self.positions), cache.dtype)
        if spec.gate is None:
            decode = partial(kernels.decode, keys=keys, divided=divided, **_softmax(spec))
        else:
            decode = partial(kernels.gated_decode, gate=spec.gate, keys=keys)
        return decode(
            qkv,
            cache,
            self.table(spec.layer),
            self.positions,
            self.limits,
            num_heads=spec.num_heads,
            scale=spec.scale,
            **(_rotation(spec) if kernels.decode_rotates else {}),
        )

    def of_rows(self, spec: AttentionSpec, qkv: Tensor, wanted: Tensor) -> Tensor:
        """See ``rosebatch.model.layers.Attention``; each row is a sequence's last one."""
        return self(spec, qkv)[wanted]

    def delta(self, spec: StateSpec, qkv: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """See ``rosebatch.model.layers.Attention``."""
        states, rows = self.shared.layer_states(spec), (self.state_slots, self.positions, self.limits)
        return self.shared.kernels.delta_decode(qkv, a, b, states, *rows, spec.weights)

    def rows(self) -> Tensor:
        """``[size]`` int32: each row's number, -1 if it is not live."""
        if self._rows is None:
            numbers = torch.arange(len(self.positions), dtype=torch.int32, device=self.positions.device)
            self._rows = torch.where(self.positions < self.limits, numbers, -1)
        return self._rows

    def table(self, layer: int) -> Tensor:
        """See ``_Step``."""
        return self.tables[self.shared.cache.group_of[layer]]

    def append_rows(self, layer: int) -> Tensor:
        """See ``_Step``; once for all layers of a group with the same number of K/V heads."""
        (cache,) = self.shared.cache.layer(layer)
        kind = self.shared.cache.group_of[layer], cache.shape[2]
        if kind not in self._append_rows:
            self._append_rows[kind] = _append_rows(cache, self.table(layer), self.rows(), self.positions)
        return self._append_rows[kind]


def _append_rows(cache: Tensor, table: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
    """See ``cache_rows``; tokens of row -1 are written to the cache's last block, which no sequence has."""
    _, blocks, kv_heads, block_size, _ = cache.shape
    there = cache_rows(table, rows.clamp_min(0), positions, kv_heads, block_size)
    heads = torch.arange(kv_heads, device=there.device)
    unused = ((blocks - 1) * kv_heads + heads) * block_size
    return torch.where(rows[:, None] >= 0, there, unused)
