"""The gated delta rule with its projections, as a sub-layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.model.contract import Attention, rows_of
from rosebatch.model.mixers.gated_delta.mixer import DeltaSpec
from rosebatch.model.sublayers import channels, columns, load_linear
from rosebatch.model.weights import Take, WeightSource, lazy_tensor
from rosebatch.ops.gated_delta import DeltaWeights
from rosebatch.ops.ops import Linear, Ops, Partial

# Ends of names: rounded, they would change what a state forgets.
_GATES = ("in_proj_b", "in_proj_a", "in_proj_ba")


@dataclass(frozen=True, slots=True)
class DeltaNet:
    """q, k, v, gate, b and a of the normed input in one linear, the rule, a gated norm, a last product.

    Attributes:
        qkv: columns as above; the gate has ``value_heads · value_dim`` of them, b and a ``value_heads`` each.
        norm: ``[value_dim]``, the norm's weight.
        eps: of the norm.
    """

    ops: Ops
    qkv: Linear
    spec: DeltaSpec
    norm: Tensor
    eps: float
    out: Linear

    def __call__(self, normed: Tensor, attention: Attention, wanted: Tensor | None = None) -> Partial:
        """See ``rosebatch.model.sublayers.Mixer``."""
        spec = self.spec
        heads = spec.value_heads, spec.value_dim
        sizes = [spec.channels, heads[0] * heads[1], heads[0], heads[0]]
        qkv, gate, b, a = self.qkv.split(normed, sizes)
        out, gate = attention(spec, qkv, a, b, wanted=wanted), rows_of(gate, wanted)
        out = out.view(-1, *heads)
        gated = self.ops.gated_norm(out, gate.unflatten(1, heads), self.norm, self.eps)
        return self.ops.project(self.out, gated.view(len(gated), -1))


def load_delta(
    config: ModelConfig,
    ops: Ops,
    weights: WeightSource,
    layer: int,
    names: Sequence[str],
    prefix: str,
    *,
    sizes: Sequence[int],
    order: Tensor | None,
) -> DeltaNet:
    """The gated delta rule of a layer.

    Args:
        config, ops, weights: of the model.
        layer: counted from 0 among the layers with a state.
        names, sizes: of the projections; see ``load_linear``.
        prefix: of the names of the other tensors.
        order: the rows of the projections in the order q, k, v, gate, b, a; None for the stored order.
    """
    delta, fp32 = config.delta, torch.float32
    assert delta is not None, "the family has the delta rule"
    group = delta.value_heads // delta.key_heads
    key_heads = ops.shard.of(delta.key_heads)
    value_heads = channels(key_heads, group)
    keys = delta.key_heads * delta.key_dim, channels(key_heads, delta.key_dim)
    inner = delta.value_heads * delta.value_dim
    values = inner, channels(value_heads, delta.value_dim)
    rates = delta.value_heads, value_heads
    own = columns(keys, keys, values, values, rates, rates)
    gates = [name for name in names if name.endswith(_GATES)]
    projection = load_linear(
        ops, weights, names, sizes, config.hidden_size, bias=False, order=order, own=own, plain=gates
    )
    mixed = columns(keys, keys, values)
    rate_take = Take.of(0, value_heads, delta.value_heads)
    conv = lazy_tensor(weights, f"{prefix}conv1d.weight", (delta.channels, 1, delta.taps)).take(0, mixed).read()
    spec = DeltaSpec(
        layer=layer,
        key_heads=len(key_heads),
        value_heads=len(value_heads),
        key_dim=delta.key_dim,
        value_dim=delta.value_dim,
        weights=DeltaWeights(
            conv=conv[:, 0].contiguous(),
            conv_bias=None,
            log_rate=weights.get(f"{prefix}A_log", (delta.value_heads,), dtype=fp32, fill=0.0, take=rate_take),
            dt_bias=weights.get(f"{prefix}dt_bias", (delta.value_heads,), dtype=fp32, fill=1.0, take=rate_take),
        ),
    )
    norm = weights.get(f"{prefix}norm.weight", (delta.value_dim,), fill=1.0)
    out = load_linear(ops, weights, [f"{prefix}out_proj"], (config.hidden_size,), inner, bias=False, inputs=values[1])
    return DeltaNet(ops, projection, spec, norm, config.norm_eps, out)
