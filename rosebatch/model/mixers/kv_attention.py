"""What kinds share that keep K and V of one size: their spec, and what norms, rotates and appends in either runner."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from rosebatch.config.model import Planes
from rosebatch.model.mixers.mixer import (
    DecodeContext,
    MixerSpec,
    PackedContext,
    QueryTiles,
    TorchContext,
    TritonContext,
    TritonMixer,
    TritonSetup,
)
from rosebatch.ops.ops import Heads, QKNorm
from rosebatch.ops.qkv import qkv_kernels


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KVAttentionSpec(MixerSpec):
    """See ``MixerSpec``. The input is ``[T, (heads + 2 · kv_heads) · D]``, q then k then v as projected.

    It may be overwritten; of a layer that shares K and V, it is q alone. The output is ``[T, heads · D]``.

    Attributes:
        num_heads, num_kv_heads: of q, and of k and v.
        head_dim: D.
        scale: factor on q·k.
        qk_norm: what q and k go through before the rotation.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qk_norm: QKNorm | None = None

    @property
    def heads(self) -> Heads:
        """Query heads, K/V heads and head size."""
        return self.num_heads, self.num_kv_heads, self.head_dim

    @property
    def projected_kv_heads(self) -> int:
        """K/V heads in the input."""
        return 0 if self.shares else self.num_kv_heads

    @property
    def planes(self) -> tuple[Planes, ...]:
        """One tensor for K and V."""
        return (Planes(self.num_kv_heads, self.head_dim, 2),)

    @property
    def prefix_heads(self) -> tuple[int, int] | None:
        """A key leaves the windows of rows at different times."""
        return None if self.window else (self.num_heads, self.num_kv_heads)

    @abstractmethod
    def attend(self, q: Tensor, planes: tuple[Tensor, ...], tiles: QueryTiles) -> Tensor:
        """``[R, heads · D]`` of queries ``[R, heads, D]``; the first of the planes holds K and V."""

    def torch_step(self, step: TorchContext, inputs: tuple[Tensor, ...]) -> Tensor:
        """Append K and V of all sequences, then attend: a block filled in this step can be read in it."""
        (qkv,), planes = inputs, step.planes(self)
        rotation = step.rotation(self.rotary)
        q, k, v = step.ops.split_heads(qkv, self.num_heads, self.projected_kv_heads, rotation, self.qk_norm)
        _append(step, self, k, v)
        return step.attend(self, q, lambda q, tiles: self.attend(q, planes, tiles))


SpecT = TypeVar("SpecT", bound=KVAttentionSpec)

# Takes the spec, the projection and the step; returns the first argument of the attention kernel.
_Prepare = Callable[[KVAttentionSpec, Tensor, TritonContext], Tensor]


class TritonKVAttention(TritonMixer[SpecT]):
    """Attention by kernels that read K and V in their blocks, and the steps before them, as the switches say."""

    def __init__(self, setup: TritonSetup, decode_kernel: Callable[..., Tensor]) -> None:
        self.decode_kernel = decode_kernel
        self.qkv = qkv_kernels(setup.switches)
        self.prepare_packed: _Prepare = _prepare_apart if self.qkv.prepare is None else self._prepare_in_one
        self.prepare_decode = self.prepare_packed
        if self.qkv.decode_appends:
            self.prepare_decode = _leave_to_kernel if self.qkv.decode_rotates else _rotate_apart

    @abstractmethod
    def prefill(self, spec: SpecT, step: PackedContext, q: Tensor, tiles: Tensor) -> Tensor:
        """``[T, heads · D]``; only rows of these tiles are computed."""

    @abstractmethod
    def decode_options(self, spec: SpecT, step: DecodeContext) -> dict[str, Any]:
        """What the decode kernel of the kind takes besides what all of them take."""

    def packed(self, spec: SpecT, step: PackedContext, inputs: tuple[Tensor, ...], wanted: Tensor | None) -> Tensor:
        """See ``TritonMixer``. K and V of all chunks are written before any is read."""
        # Each of the last rows has a tile of its own. Tiles that chunks share are faster.
        tiles = step.tiles if wanted is None or len(step.pieces) else step.last_tiles
        spec, qkv = self._normed(spec, *inputs)
        out = self.prefill(spec, step, self.prepare_packed(spec, qkv, step), tiles)
        return out if wanted is None else out[wanted]

    def decode(self, spec: SpecT, step: DecodeContext, inputs: tuple[Tensor, ...]) -> Tensor:
        """See ``TritonMixer``. The kernel does all of it, or attends to what was prepared."""
        spec, qkv = self._normed(spec, *inputs)
        rows = step.planes(spec)[0], step.table(spec), step.positions, step.limits
        options = self.decode_options(spec, step)
        if step.rotary_rows is not None or spec.shares:
            # The kernel turns by the position alone, and k along with q.
            qkv, options = self.prepare_packed(spec, qkv, step), options | {"append": False}
        else:
            qkv = self.prepare_decode(spec, qkv, step)
            options |= _rotation(spec, step) if self.qkv.decode_rotates else {}
        return self.decode_kernel(qkv, *rows, num_heads=spec.num_heads, scale=spec.scale, **options)

    def _normed(self, spec: SpecT, qkv: Tensor) -> tuple[SpecT, Tensor]:
        """q and k normed by kernels of their own, and a spec without a norm: where no other kernel norms them."""
        if spec.qk_norm is None or not self.qkv.norms_apart(spec.qk_norm):
            return spec, qkv
        qkv = self.qkv.norm_heads(qkv, spec.num_heads, spec.projected_kv_heads, spec.qk_norm)
        return replace(spec, qk_norm=None), qkv

    def _prepare_in_one(self, spec: KVAttentionSpec, qkv: Tensor, step: TritonContext) -> Tensor:
        """Norm, rotate and append by one kernel, q in place."""
        assert self.qkv.prepare is not None
        cache, *scales = step.planes(spec)
        options = {"num_heads": spec.num_heads, "rotary_rows": step.rotary_rows, **_rotation(spec, step)}
        options["append"] = not spec.shares
        if scales:
            (options["scales"],) = scales
        self.qkv.prepare(qkv, cache, step.table(spec), step.rows(), step.positions, **options)
        return qkv


def _leave_to_kernel(spec: KVAttentionSpec, qkv: Tensor, step: TritonContext) -> Tensor:
    return qkv


def _rotate_apart(spec: KVAttentionSpec, qkv: Tensor, step: TritonContext) -> Tensor:
    """Norm and rotate by separate operators; the decode kernel appends."""
    if spec.rotary is None and spec.qk_norm is None:
        return qkv
    return torch.cat(_heads(spec, qkv, step), 1).view(len(qkv), -1)


def _append(step: TorchContext | TritonContext, spec: KVAttentionSpec, k: Tensor, v: Tensor) -> None:
    """Write K and V, with scales if there are any: these have the same rows."""
    if spec.shares:
        return
    cache, *scales = step.planes(spec)
    step.ops.kv_append(cache, k, v, step.append_rows(spec)[0], *scales)


def _prepare_apart(spec: KVAttentionSpec, qkv: Tensor, step: TritonContext) -> Tensor:
    """Norm, rotate and append by separate operators."""
    q, k, v = _heads(spec, qkv, step)
    _append(step, spec, k, v)
    return qkv if spec.rotary is None and spec.qk_norm is None else q.reshape(len(qkv), -1)


def _heads(spec: KVAttentionSpec, qkv: Tensor, step: TritonContext) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v, normed and rotated by separate operators: the way of ``--no-fused-rotary``."""
    rotary, rows = spec.rotary, step.positions if step.rotary_rows is None else step.rotary_rows
    rotation = None
    if rotary is not None:
        cos, sin = step.rotary_tables(rotary)
        rotation = cos[rows][:, None], sin[rows][:, None]
    return step.ops.split_heads(qkv, spec.num_heads, spec.projected_kv_heads, rotation, spec.qk_norm)


def _rotation(spec: KVAttentionSpec, step: TritonContext) -> dict[str, Any]:
    rotary = None if spec.rotary is None else step.rotary_tables(spec.rotary)
    return {"rotary": rotary, "qk_norm": spec.qk_norm}
