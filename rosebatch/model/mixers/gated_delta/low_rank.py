"""The gated delta rule whose decays and gate are products of low rank, as a sub-layer (KDA, arXiv 2510.26692)."""

from dataclasses import dataclass
from functools import partial

from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.model.contract import Attention, rows_of
from rosebatch.model.mixers.gated_delta.mixer import DeltaSpec
from rosebatch.model.mixers.gated_delta.sublayer import DeltaNames, load_result, load_spec, own_parts
from rosebatch.model.sublayers import columns, load_linear
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import Linear, Ops, Partial

_NAMES = DeltaNames(("q_conv1d", "k_conv1d", "v_conv1d"), "o_norm", "o_proj")
_FIRST = ("q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj")
# Rounded, they would change what a state forgets.
_DECAYS = ("f_a_proj", "f_b_proj", "b_proj")


@dataclass(frozen=True, slots=True)
class LowRankDeltaNet:
    """q, k, v, b and what a and the gate are made of in one linear, the rule, a norm with a sigmoid, a last product.

    Attributes:
        first: columns of q, k and v, then what a is made of, the same of the gate, and b.
        decays, gate: the second products, which make a and the gate.
        norm: ``[value_dim]``, the norm's weight.
        eps: of the norm.
    """

    ops: Ops
    first: Linear
    decays: Linear
    gate: Linear
    spec: DeltaSpec
    norm: Tensor
    eps: float
    out: Linear

    def __call__(self, normed: Tensor, attention: Attention, wanted: Tensor | None = None) -> Partial:
        """See ``rosebatch.model.sublayers.Mixer``."""
        spec = self.spec
        sizes = [spec.channels, spec.key_dim, spec.value_dim, spec.value_heads]
        qkv, of_decays, of_gate, b = self.first.split(normed, sizes)
        out = attention(spec, qkv, self.decays(of_decays), b, wanted=wanted)
        heads = spec.value_heads, spec.value_dim
        gate = self.gate(rows_of(of_gate, wanted)).unflatten(1, heads)
        gated = self.ops.gated_norm(out.view(-1, *heads), gate, self.norm, self.eps, "sigmoid")
        return self.ops.project(self.out, gated.view(len(gated), -1))


def load_low_rank_delta(
    config: ModelConfig, ops: Ops, weights: WeightSource, layer: int, prefix: str
) -> LowRankDeltaNet:
    """The rule of a layer; see ``load_delta``."""
    delta = config.delta
    assert delta is not None, "the family has the delta rule"
    heads, keys, values = own_parts(delta, ops)
    # All processes have what a and the gate are made of.
    ranks = [(rank, range(rank)) for rank in (delta.key_dim, delta.value_dim)]
    parts = (keys, keys, values, *ranks, heads)
    linear = partial(load_linear, ops, weights, bias=False, plain=[prefix + name for name in _DECAYS])
    sizes, hidden = [size for size, _ in parts], config.hidden_size
    norm, out = load_result(config, ops, weights, prefix, _NAMES)
    return LowRankDeltaNet(
        ops=ops,
        first=linear([prefix + name for name in _FIRST], sizes, hidden, own=columns(*parts)),
        decays=linear([f"{prefix}f_b_proj"], keys[:1], delta.key_dim, own=columns(keys)),
        gate=linear([f"{prefix}g_b_proj"], values[:1], delta.value_dim, own=columns(values)),
        spec=load_spec(delta, ops, weights, layer, prefix, _NAMES),
        norm=norm,
        eps=config.norm_eps,
        out=out,
    )
