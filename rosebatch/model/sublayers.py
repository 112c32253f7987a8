"""The sub-layers of most families: mixers and MLPs. Each leaves its sum to the next norm."""

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.core.errors import UserError
from rosebatch.model.contract import Attention
from rosebatch.model.lazy_tensor import LazyTensor, join
from rosebatch.model.mixers.mixer import MixerSpec
from rosebatch.model.quantization.forms import load_matrix, load_weight
from rosebatch.model.quantization.joined import joined
from rosebatch.model.weights import WeightSource, lazy_tensor
from rosebatch.ops.ops import GATES, Linear, Ops, Partial, ScaledLinear
from rosebatch.ops.weight import Indices


class Mixer(Protocol):
    """What mixes the tokens of a sequence in a layer: attention, or a rule that keeps a state."""

    @property
    def spec(self) -> MixerSpec:
        """What a runner needs of it."""
        ...

    def __call__(self, normed: Tensor, attention: Attention, wanted: Tensor | None = None) -> Partial:
        """``[T, H] -> [T, H]``, not yet added to the residual; with ``wanted``, these rows alone."""
        ...


class MLP(Protocol):
    """What follows attention in a layer: an MLP, or a mixture of experts."""

    def __call__(self, normed: Tensor) -> Partial:
        """``[T, H] -> [T, H]``, not yet added to the residual."""
        ...


class LayerNorm(NamedTuple):
    """Weight and bias ``[H]``."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """q, k and v of the normed input in one product, attention, and a last product."""

    ops: Ops
    qkv: Linear
    spec: MixerSpec
    out: Linear

    def __call__(self, normed: Tensor, attention: Attention, wanted: Tensor | None = None) -> Partial:
        """See ``Mixer``."""
        return self.ops.project(self.out, attention(self.spec, self.qkv(normed), wanted=wanted))


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """``down(activation(gate(x)) · up(x))``; gate and up are one product."""

    ops: Ops
    activation: str
    gate_up: Linear
    down: Linear

    def __call__(self, normed: Tensor) -> Partial:
        """See ``MLP``."""
        gated = self.ops.gated(GATES[self.activation], self.gate_up, normed, self.down)
        return self.ops.project(self.down, gated)


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


def load_projections(
    config: ModelConfig,
    ops: Ops,
    weights: WeightSource,
    qkv_names: Sequence[str],
    out_name: str,
    *,
    order: Tensor | None = None,
    gated: bool = False,
    transposed: bool = False,
    keys: bool = True,
) -> tuple[range, range, Linear, Linear]:
    """The projections of a layer's attention; see ``load_linear`` for the names.

    Args:
        order: the rows of q, k and v, in the order that attention wants; None for the stored order.
        gated: whether the first has a gate for each of q's channels, after v.
        transposed: see ``load_weight``.
        keys: whether the first makes k and v, or q alone.

    Returns:
        heads and K/V heads of this process, and its products before and after attention.
    """
    c = config
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    heads, kv_heads = ops.shard.of(c.num_heads), ops.shard.kv_heads(c.num_kv_heads)
    q, kv = channels(heads, c.head_dim), channels(kv_heads, c.head_dim)
    pieces, sizes = [(q_size, q), *[(kv_size, kv)] * 2 * keys], ((1 + gated) * q_size, *(kv_size, kv_size) * keys)
    own = columns(*pieces, *pieces[:gated])
    linear = partial(load_linear, ops, weights, transposed=transposed)
    qkv = linear(qkv_names, sizes, c.hidden_size, bias=c.qkv_bias, order=order, own=own)
    return heads, kv_heads, qkv, linear([out_name], (c.hidden_size,), q_size, bias=c.out_bias, inputs=q)


def load_layer_norm(config: ModelConfig, weights: WeightSource, name: str, *, bias: bool = True) -> LayerNorm:
    """A LayerNorm of hidden states."""
    shape = (config.hidden_size,)
    return LayerNorm(
        weights.get(f"{name}.weight", shape, fill=1.0), weights.get(f"{name}.bias", shape) if bias else None
    )


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


def load_plain_mlp(
    config: ModelConfig, ops: Ops, weights: WeightSource, up_name: str, down_name: str, *, transposed: bool = False
) -> PlainMLP:
    """An MLP whose projections have these names; ``transposed`` see ``load_weight``."""
    c = config
    size, inner = c.intermediate_size, ops.shard.of(c.intermediate_size)
    linear = partial(load_linear, ops, weights, bias=c.mlp_bias, transposed=transposed)
    up = linear([up_name], (size,), c.hidden_size, own=columns((size, inner)))
    down = linear([down_name], (c.hidden_size,), size, inputs=inner)
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
    transposed: bool = False,
    plain: Collection[str] = (),
    plain_rows: int = 0,
) -> Linear:
    """Several projections of one input as a single product.

    Args:
        ops, weights: of the model.
        names: of the projections. A single name means all of them: the checkpoint has fused them already.
        sizes: the number of outputs of each.
        in_size: of their input.
        bias: whether they have one.
        order: the rows of the stored weight, in the order of the product's columns; None for the stored order.
        own: the columns of the product that this process computes, see ``columns``; None for all.
        inputs: the channels of the input that this process has; None for all.
        transposed: see ``load_weight``.
        plain: names of those that the run does not round.
        plain_rows: so many last rows of the last one, which the run does not round.

    Raises:
        UserError: a weight is missing, or there are biases where ``bias`` says none.
    """
    stored = sizes if len(names) == len(sizes) else (sum(sizes),)
    each = list(zip(names, stored, strict=True))
    parts = [
        (load_weight if name in plain else load_matrix)(
            weights, f"{name}.weight", (size, in_size), transposed=transposed
        )
        for name, size in each
    ]
    if plain_rows and weights.rounding is not None:
        name, size = each[-1]
        unrounded = load_weight(weights, f"{name}.weight", (size, in_size), transposed=transposed)
        first = size - plain_rows
        parts[-1:] = [parts[-1].rows(range(first)), unrounded.rows(range(first, size))]
    weight = joined(parts)
    rows: Indices = range(sum(sizes)) if order is None else order.numpy()
    if own is not None:
        rows = np.asarray(rows)[own]
    weight = weight.rows(rows) if inputs is None else weight.rows(rows).columns(inputs)
    biases: LazyTensor | None
    if bias:
        biases = join([lazy_tensor(weights, f"{name}.bias", (size,)) for name, size in each], 0)
    else:
        _require_no_biases(weights, names)
        biases = _added_biases(weights, each)
    return ops.linear(weight, None if biases is None else biases.take(0, rows).read())


def _added_biases(weights: WeightSource, each: Sequence[tuple[str, int]]) -> LazyTensor | None:
    """Biases of an adapter, where the model has none; zeros for the other projections of one product."""
    names = [f"{name}.bias" for name, size in each if weights.change(f"{name}.bias", (size,)) is not None]
    if not names:
        return None
    found = [weights.get(f"{name}.bias", (size,)) if f"{name}.bias" in names else None for name, size in each]
    like = next(bias for bias in found if bias is not None)
    filled = [like.new_zeros(size) if bias is None else bias for (_, size), bias in zip(each, found, strict=True)]
    return join([LazyTensor.of(bias) for bias in filled], 0)


def _require_no_biases(weights: WeightSource, names: Sequence[str]) -> None:
    """Zeros change nothing: writers of GPTQ store them. All others would be dropped without a word."""
    for name in names:
        shape = weights.shape(f"{name}.bias")
        if shape is None:
            continue
        found = weights.get(f"{name}.bias", shape)
        if not found.is_meta and found.any():
            raise UserError(f"{name}.bias: the weights have it, and by config.json this model has no such bias")


def scaled(linear: Linear, factors: Sequence[float], sizes: Sequence[int], like: Tensor) -> Linear:
    """The linear, with a factor for each of several pieces of its columns.

    Args:
        factors, sizes: of the pieces.
        like: a tensor on the run's device.
    """
    if all(factor == 1 for factor in factors):
        return linear
    each = [factor for factor, size in zip(factors, sizes, strict=True) for _ in range(size)]
    return ScaledLinear(linear, like.new_tensor(each, dtype=torch.float32))


def channels(heads: range, size: int) -> range:
    """The channels of neighbouring heads, each of this size."""
    return range(heads.start * size, heads.stop * size)


def columns(*pieces: tuple[int, range]) -> np.ndarray:
    """A part of each of several pieces, which are next to each other.

    Args:
        pieces: the size of each, and what is wanted of it.
    """
    starts = itertools.accumulate((size for size, _ in pieces), initial=0)
    return np.concatenate([start + np.arange(p.start, p.stop) for start, (_, p) in zip(starts, pieces, strict=False)])
