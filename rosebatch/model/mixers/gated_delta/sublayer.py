"""The gated delta rule with its projections, as a sub-layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rosebatch.config.gated_delta import DeltaConfig
from rosebatch.config.model import ModelConfig
from rosebatch.model.contract import Attention, rows_of
from rosebatch.model.lazy_tensor import LazyTensor, join
from rosebatch.model.mixers.gated_delta.mixer import DeltaSpec
from rosebatch.model.sublayers import channels, columns, load_linear
from rosebatch.model.weights import Take, WeightSource, lazy_tensor
from rosebatch.ops.gated_delta import DeltaWeights
from rosebatch.ops.ops import Linear, Ops, Partial

# Ends of names: rounded, they would change what a state forgets.
_GATES = ("in_proj_b", "in_proj_a", "in_proj_ba", ".b_proj", ".a_proj")


class DeltaNames(NamedTuple):
    """Names of a layer's tensors beside its first projections.

    Attributes:
        conv: of all channels, or of those of q, k and v.
        norm, out: of the gated norm and the last product.
    """

    conv: tuple[str, ...] = ("conv1d",)
    norm: str = "norm"
    out: str = "out_proj"


_NAMES = DeltaNames()


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
    own_names: DeltaNames = _NAMES,
    eps: float,
) -> DeltaNet:
    """The gated delta rule of a layer.

    Args:
        config, ops, weights: of the model.
        layer: counted from 0 among the layers with a state.
        names, sizes: of the projections; see ``load_linear``.
        prefix: of the names of the other tensors, which are ``own_names``.
        order: the rows of the projections in the order q, k, v, gate, b, a; None for the stored order.
        eps: of the gated norm.
    """
    assert config.delta is not None, "the family has the delta rule"
    heads, keys, values = own_parts(config.delta, ops)
    own = columns(keys, keys, values, values, heads, heads)
    gates = [name for name in names if name.endswith(_GATES)]
    projection = load_linear(
        ops, weights, names, sizes, config.hidden_size, bias=False, order=order, own=own, plain=gates
    )
    spec = load_spec(config.delta, ops, weights, layer, prefix, own_names)
    norm, out = load_result(config, ops, weights, prefix, own_names)
    return DeltaNet(ops, projection, spec, norm, eps, out)


# The number of all, and what this process has of them.
_Part = tuple[int, range]


def own_parts(delta: DeltaConfig, ops: Ops) -> tuple[_Part, _Part, _Part]:
    """Value heads, channels of all keys, and channels of all values."""
    key_heads = ops.shard.of(delta.key_heads)
    value_heads = channels(key_heads, delta.value_heads // delta.key_heads)
    keys = delta.key_heads * delta.key_dim, channels(key_heads, delta.key_dim)
    values = delta.value_heads * delta.value_dim, channels(value_heads, delta.value_dim)
    return (delta.value_heads, value_heads), keys, values


def load_spec(
    delta: DeltaConfig, ops: Ops, weights: WeightSource, layer: int, prefix: str, names: DeltaNames
) -> DeltaSpec:
    """The rule of a layer; see ``load_delta``."""
    (count, heads), keys, values = own_parts(delta, ops)
    fp32 = torch.float32
    # Kimi Linear stores rates of heads as four dimensions, and steps of all channels of keys.
    shape, dim = ((1, 1, count, 1), 2) if delta.by_channel else ((count,), 0)
    steps = (count * delta.key_dim, channels(heads, delta.key_dim)) if delta.by_channel else (count, heads)
    rates = weights.get(f"{prefix}A_log", shape, dtype=fp32, fill=0.0, take=Take.of(dim, heads, count))
    step_take = Take.of(0, steps[1], steps[0])
    conv = _find_conv(delta, weights, [f"{prefix}{name}.weight" for name in names.conv])
    return DeltaSpec(
        layer=layer,
        key_heads=len(keys[1]) // delta.key_dim,
        value_heads=len(heads),
        key_dim=delta.key_dim,
        value_dim=delta.value_dim,
        weights=DeltaWeights(
            conv=conv.take(0, columns(keys, keys, values)).read()[:, 0].contiguous(),
            conv_bias=None,
            log_rate=rates.flatten(),
            dt_bias=weights.get(f"{prefix}dt_bias", steps[:1], dtype=fp32, fill=1.0, take=step_take),
            max_beta=delta.max_beta,
        ),
    )


def load_result(
    config: ModelConfig, ops: Ops, weights: WeightSource, prefix: str, names: DeltaNames
) -> tuple[Tensor, Linear]:
    """The weight of the gated norm, and the last product; see ``load_delta``."""
    assert config.delta is not None
    norm = weights.get(f"{prefix}{names.norm}.weight", (config.delta.value_dim,), fill=1.0)
    (inner, own), hidden = own_parts(config.delta, ops)[2], (config.hidden_size,)
    return norm, load_linear(ops, weights, [f"{prefix}{names.out}"], hidden, inner, bias=False, inputs=own)


def _find_conv(delta: DeltaConfig, weights: WeightSource, names: Sequence[str]) -> LazyTensor:
    """The convolution of all channels, ``[C, 1, taps]``.

    Where it has a tensor each for q, k and v, transformers stores thirds of all channels instead.
    """
    keys = delta.key_heads * delta.key_dim
    sizes = [delta.channels] if len(names) == 1 else [keys, keys, delta.channels - 2 * keys]
    stored = [shape[0] for name in names if (shape := weights.shape(name))]
    sizes = stored if len(stored) == len(names) and sum(stored) == delta.channels else sizes
    parts = zip(names, sizes, strict=True)
    return join([lazy_tensor(weights, name, (size, 1, delta.taps)) for name, size in parts], 0)
