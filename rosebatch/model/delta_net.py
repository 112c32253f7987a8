"""The sub-layers of Qwen3-Next and Qwen3.5: attention whose result is gated, and the gated delta rule."""

from dataclasses import dataclass

from torch import Tensor

from rosebatch.model.layers import Attention, AttentionSpec, StateSpec, attend, rows_of
from rosebatch.ops.ops import Linear, Ops, Partial


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """q, k, v and a gate of the normed input in one product, attention times sigmoid(gate), a product behind it."""

    ops: Ops
    qkv: Linear
    spec: AttentionSpec
    out: Linear

    def __call__(self, normed: Tensor, attention: Attention, wanted: Tensor | None = None) -> Partial:
        """See ``rosebatch.model.sublayers.Mixer``."""
        spec = self.spec
        size = spec.num_heads * spec.head_dim
        qkv, gate = self.qkv(normed).split([size + 2 * spec.num_kv_heads * spec.head_dim, size], 1)
        attended = attend(attention, spec, qkv, wanted)
        return self.ops.project(self.out, self.ops.sigmoid_mul(attended, rows_of(gate, wanted)))


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """q, k, v, gate, b and a of the normed input in one product, the rule, a gated norm, a product behind it.

    Attributes:
        qkv: columns as above; the gate has ``value_heads · value_dim`` of them, b and a ``value_heads`` each.
        norm: ``[value_dim]``, the norm's weight.
        eps: of the norm.
    """

    ops: Ops
    qkv: Linear
    spec: StateSpec
    norm: Tensor
    eps: float
    out: Linear

    def __call__(self, normed: Tensor, attention: Attention, wanted: Tensor | None = None) -> Partial:
        """See ``rosebatch.model.sublayers.Mixer``."""
        spec = self.spec
        heads = spec.value_heads, spec.value_dim
        sizes = [spec.input_shape[1], heads[0] * heads[1], heads[0], heads[0]]
        qkv, gate, b, a = self.qkv(normed).split(sizes, 1)
        out, gate = (rows_of(each, wanted) for each in (attention.delta(spec, qkv, a, b), gate))
        out = out.view(-1, *heads)
        gated = self.ops.gated_norm(out, gate.unflatten(1, heads), self.norm, self.eps)
        return self.ops.project(self.out, gated.view(len(gated), -1))
