"""The sub-layers of most families: mixers and MLPs. Each leaves its sum to the next norm."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.model.layers import Attention
from rosebatch.model.mixers.mixer import MixerSpec
from rosebatch.model.weights import Take, WeightSource
from rosebatch.ops.ops import GATES, Linear, Ops, Partial, Weight


class Mixer(Protocol):
    """What mixes the tokens of a sequence in a layer: attention, or a rule that keeps a state."""

    @property
    def spec(self) -> MixerSpec:
        """What a runner has to know of it."""
        ...

    def __call__(self, normed: Tensor, attention: Attention, wanted: Tensor | None = None) -> Partial:
        """``[T, H] -> [T, H]``, not yet added to the residual; with ``wanted``, these rows alone."""
        ...


class MLP(Protocol):
    """What follows attention in a layer: an MLP, or a mixture of experts."""

    def __call__(self, normed: Tensor) -> Partial:
        """``[T, H] -> [T, H]``, not yet added to the residual."""
        ...


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """``down(activation(gate(x)) · up(x))``; gate and up are one product."""

    ops: Ops
    activation: str
    gate_up: Linear
    down: Linear

    def __call__(self, normed: Tensor) -> Partial:
        """See ``MLP``."""
        return self.ops.project(self.down, self.ops.gated(GATES[self.activation], self.gate_up, normed))


@dataclass(frozen=True, slots=True)
class PlainMLP:
    """``down(activation(up(x)))``."""

    ops: Ops
    activation: str
    up: Linear
    down: Linear

    def __call__(self, normed: Tensor) -> Partial:
        """See ``MLP``."""
        return self.ops.project(self.down, self.ops.activated(self.activation, self.up, normed))


def load_gated_mlp(
    config: ModelConfig, ops: Ops, weights: WeightSource, gate_up_names: Sequence[str], down_name: str
) -> GatedMLP:
    """An MLP whose projections have these names; see ``load_linear``."""
    c = config
    size, inner = c.intermediate_size, ops.shard.of(c.intermediate_size)
    own = columns((size, inner), (size, inner))
    gate_up = load_linear(ops, weights, gate_up_names, (size, size), c.hidden_size, bias=c.mlp_bias, own=own)
    down = load_linear(ops, weights, [down_name], (c.hidden_size,), size, bias=c.mlp_bias, inputs=inner)
    return GatedMLP(ops, c.activation, gate_up, down)


def load_plain_mlp(config: ModelConfig, ops: Ops, weights: WeightSource, up_name: str, down_name: str) -> PlainMLP:
    """An MLP whose projections have these names."""
    c = config
    size, inner = c.intermediate_size, ops.shard.of(c.intermediate_size)
    own = columns((size, inner))
    up = load_linear(ops, weights, [up_name], (size,), c.hidden_size, bias=c.mlp_bias, own=own)
    down = load_linear(ops, weights, [down_name], (c.hidden_size,), size, bias=c.mlp_bias, inputs=inner)
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
    own: np.ndarray | None = None,
    inputs: range | None = None,
) -> Linear:
    """Several projections of one input as a single product.

    Args:
        ops, weights: of the model.
        names: of the projections. A single name stands for all of them: the checkpoint has fused them already.
        sizes: what each of them puts out.
        in_size: of their input.
        bias: whether they have one.
        order: the rows of the stored weight, in the order of the product's columns; None for the stored order.
        own: those columns of the product that this process computes, see ``columns``; None for all.
        inputs: the channels of the input that this process has; None for all.
    """
    stored = sizes if len(names) == len(sizes) else (sum(sizes),)
    wanted = None if order is None else order.numpy()
    if own is not None:
        wanted = own if wanted is None else wanted[own]
    cut = None if inputs is None else Take.of(1, inputs, in_size)

    def load(kind: str, *shape: int) -> Tensor:
        takes: Sequence[Take | None] = [cut if shape else None] * len(stored)
        if own is not None:
            assert cut is None and wanted is not None, "a product is divided by its columns or by its inputs"
            takes = _rows_of_each(wanted, stored)
        each = [
            weights.get(f"{name}.{kind}", (size, *shape), take=take)
            for name, size, take in zip(names, stored, takes, strict=True)
        ]
        whole = each[0] if len(each) == 1 else torch.cat(each)
        if wanted is None:
            return whole
        # The place of each wanted row among those that were read, which are in the stored order.
        places = wanted.argsort().argsort()
        in_order = (places == np.arange(len(places))).all()
        return whole if in_order else whole[torch.from_numpy(places).to(whole.device)]

    return ops.linear(Weight(load("weight", in_size)), load("bias") if bias else None)


def _rows_of_each(wanted: np.ndarray, sizes: Sequence[int]) -> list[Take]:
    """The rows that are wanted of each of several tensors, which stand one below the other."""
    found, start = [], 0
    for size in sizes:
        own = wanted[(wanted >= start) & (wanted < start + size)] - start
        found.append(Take(0, np.sort(own)))
        start += size
    return found


def channels(heads: range, size: int) -> range:
    """The channels of neighbouring heads, each of this size."""
    return range(heads.start * size, heads.stop * size)


def columns(*pieces: tuple[int, range]) -> np.ndarray | None:
    """A part of each of several pieces, which stand side by side; None if that is all of them.

    Args:
        pieces: the size of each, and what is wanted of it.
    """
    if all(len(part) == size for size, part in pieces):
        return None
    starts = itertools.accumulate((size for size, _ in pieces), initial=0)
    return np.concatenate([start + np.arange(p.start, p.stop) for start, (_, p) in zip(starts, pieces, strict=False)])
