"""The sub-layers of most families: attention with its projections, and MLPs. Each leaves its sum to the next norm."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rosebatch.config import ModelConfig
from rosebatch.model.layers import Attention, AttentionSpec, Rotary, StateSpec
from rosebatch.model.weights import WeightSource
from rosebatch.ops import GATES, Linear, Ops, Pending, QKNorm, Weight


class Mixer(Protocol):
    """What mixes the tokens of a sequence in a layer: attention, or a rule that keeps a state."""

    @property
    def spec(self) -> AttentionSpec | StateSpec:
        """What a runner has to know of it."""
        ...

    def __call__(self, normed: Tensor, attention: Attention) -> Pending:
        """``[T, H] -> [T, H]``, not yet added to the residual."""
        ...


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """q, k and v of the normed input in one product, attention, and the product behind it."""

    ops: Ops
    qkv: Linear
    spec: AttentionSpec
    out: Linear

    def __call__(self, normed: Tensor, attention: Attention) -> Pending:
        """See ``Mixer``."""
        return self.ops.project(self.out, attention(self.spec, self.qkv(normed)))


class MLP(Protocol):
    """What follows attention in a layer: an MLP, or a mixture of experts."""

    def __call__(self, normed: Tensor) -> Pending:
        """``[T, H] -> [T, H]``, not yet added to the residual."""
        ...


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """``down(activation(gate(x)) · up(x))``; gate and up are one product."""

    ops: Ops
    activation: str
    gate_up: Linear
    down: Linear

    def __call__(self, normed: Tensor) -> Pending:
        """See ``MLP``."""
        return self.ops.project(self.down, self.ops.gated(GATES[self.activation], self.gate_up, normed))


@dataclass(frozen=True, slots=True)
class PlainMLP:
    """``down(activation(up(x)))``."""

    ops: Ops
    activation: str
    up: Linear
    down: Linear

    def __call__(self, normed: Tensor) -> Pending:
        """See ``MLP``."""
        return self.ops.project(self.down, self.ops.activated(self.activation, self.up, normed))


def load_attention(
    config: ModelConfig,
    ops: Ops,
    weights: WeightSource,
    layer: int,
    qkv_names: Sequence[str],
    out_name: str,
    *,
    rotary: Rotary | None,
    qk_norm: QKNorm | None,
    qkv_order: Tensor | None,
    sinks: Tensor | None = None,
) -> SelfAttention:
    """The attention of a layer.

    Args:
        config, ops, weights: of the model.
        layer: counted from 0.
        qkv_names, out_name: of the projections; see ``load_linear``.
        rotary, qk_norm, sinks: see ``AttentionSpec``.
        qkv_order: the rows of q, k and v, in the order that attention wants; None for the stored order.
    """
    c = config
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    sizes = (q_size, kv_size, kv_size)
    qkv = load_linear(ops, weights, qkv_names, sizes, c.hidden_size, bias=c.qkv_bias, order=qkv_order)
    out = load_linear(ops, weights, [out_name], (c.hidden_size,), q_size, bias=c.out_bias)
    spec = AttentionSpec(
        layer=layer,
        num_heads=c.num_heads,
        num_kv_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        scale=c.attention_scale(layer),
        window=c.sliding_window(layer),
        soft_cap=c.attention_soft_cap,
        sinks=sinks,
        qk_norm=qk_norm,
        rotary=rotary,
    )
    return SelfAttention(ops, qkv, spec, out)


def load_gated_mlp(
    config: ModelConfig, ops: Ops, weights: WeightSource, gate_up_names: Sequence[str], down_name: str
) -> GatedMLP:
    """An MLP whose projections have these names; see ``load_linear``."""
    c = config
    sizes = (c.intermediate_size, c.intermediate_size)
    gate_up = load_linear(ops, weights, gate_up_names, sizes, c.hidden_size, bias=c.mlp_bias)
    down = load_linear(ops, weights, [down_name], (c.hidden_size,), c.intermediate_size, bias=c.mlp_bias)
    return GatedMLP(ops, c.activation, gate_up, down)


def load_plain_mlp(config: ModelConfig, ops: Ops, weights: WeightSource, up_name: str, down_name: str) -> PlainMLP:
    """An MLP whose projections have these names."""
    c = config
    up = load_linear(ops, weights, [up_name], (c.intermediate_size,), c.hidden_size, bias=c.mlp_bias)
    down = load_linear(ops, weights, [down_name], (c.hidden_size,), c.intermediate_size, bias=c.mlp_bias)
    return PlainMLP(ops, c.activation, up, down)


def load_linear(
    ops: Ops,
    weights: WeightSource,
    names: Sequence[str],
    sizes: Sequence[int],
    in_size: int,
    *,
    bias: bool,
    order: Tensor | None = None,
) -> Linear:
    """Several projections of one input as a single product.

    Args:
        ops, weights: of the model.
        names: of the projections. A single name stands for all of them: the checkpoint has fused them already.
        sizes: what each of them puts out.
        in_size: of their input.
        bias: whether they have one.
        order: the rows of the stored weight, in the order of the product's columns; None for the stored order.
    """
    stored = sizes if len(names) == len(sizes) else (sum(sizes),)

    def load(kind: str, *shape: int) -> Tensor:
        each = [weights.get(f"{name}.{kind}", (size, *shape)) for name, size in zip(names, stored, strict=True)]
        whole = each[0] if len(each) == 1 else torch.cat(each)
        return whole if order is None else whole[order.to(whole.device)]

    return ops.linear(Weight(load("weight", in_size)), load("bias") if bias else None)
