"""Attention with a softmax."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from torch import Tensor

from rosebatch.config.model import Planes
from rosebatch.model.rope import Rotary
from rosebatch.ops.ops import Gate, Heads, QKNorm


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class AttentionSpec:
    """The attention of one layer. The model owns it, a runner carries it out; layers may differ in all of it.

    Attributes:
        layer: counted from 0 among the layers with a KV cache.
        num_heads, num_kv_heads: of q, and of k and v.
        head_dim: D.
        scale: factor on q·k.
        window: keys that a query sees, its own included; 0 for all.
        soft_cap: a score becomes ``soft_cap · tanh(score / soft_cap)`` before the mask; 0 for no cap (Gemma 2).
        sinks: ``[num_heads]``, a further logit of each head's softmax, which has no value (gpt-oss); None for none.
        qk_norm: what q and k go through before the rotation.
        rotary: None if positions are not rotary.
        gate: of HP1 attention, which has no cap and no sinks; None for softmax.
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int = 0
    soft_cap: float = 0.0
    sinks: Tensor | None = None
    qk_norm: QKNorm | None = None
    rotary: Rotary | None = None
    gate: Gate | None = None

    def __post_init__(self) -> None:
        assert self.gate is None or (self.soft_cap == 0 and self.sinks is None), "a gate takes the softmax's place"

    @property
    def heads(self) -> Heads:
        """Query heads, K/V heads and head size."""
        return self.num_heads, self.num_kv_heads, self.head_dim

    @property
    def planes(self) -> tuple[Planes, ...]:
        """What the layer keeps in the KV cache: one tensor for K and V."""
        return (Planes(self.num_kv_heads, self.head_dim, 2),)


def heads_of(specs: Sequence[AttentionSpec]) -> tuple[Collection[Heads], Collection[Heads]]:
    """The heads of the layers with softmax, and of those with a gate."""
    softmax = {spec.heads for spec in specs if spec.gate is None}
    return softmax, {spec.heads for spec in specs if spec.gate is not None}
