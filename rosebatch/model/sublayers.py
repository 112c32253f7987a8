"""The sub-layers of most families: attention with its projections, and MLPs. Each leaves its sum to the next norm."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from rosebatch.model.layers import Attention, AttentionSpec, StateSpec
from rosebatch.model.weights import WeightSource
from rosebatch.ops import GATES, Linear, Ops, Pending, Weight


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
