"""Mamba2 with its projections, as a sub-layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.model.contract import Attention, rows_of
from rosebatch.model.mixers.mamba2.mixer import MambaSpec
from rosebatch.model.sublayers import channels, columns, load_linear, scaled
from rosebatch.model.weights import Take, WeightSource, lazy_tensor
from rosebatch.ops.mamba2 import MambaWeights
from rosebatch.ops.ops import Linear, Ops, Partial


@dataclass(frozen=True, slots=True)
class Mamba:
    """Gate, x, B, C and steps of the normed input in one linear, the state space, gate and norm, a last product.

    Attributes:
        norm: ``[heads · head_dim]``, the norm's weight; None for a gate alone.
        eps: of the norm.
    """

    ops: Ops
    projection: Linear
    spec: MambaSpec
    norm: Tensor | None
    eps: float
    out: Linear

    def __call__(self, normed: Tensor, attention: Attention, wanted: Tensor | None = None) -> Partial:
        """See ``rosebatch.model.sublayers.Mixer``."""
        spec = self.spec
        gate, xbc, dt = self.projection.split(normed, [spec.heads * spec.head_dim, len(spec.weights.conv), spec.heads])
        out, gate = attention(spec, xbc, dt, wanted=wanted), rows_of(gate, wanted)
        return self.ops.project(self.out, self.ops.gate_norm(out, gate, self.norm, spec.groups, self.eps))


def load_mamba(config: ModelConfig, ops: Ops, weights: WeightSource, layer: int, prefix: str) -> Mamba:
    """Mamba2 of a layer.

    Args:
        config, ops, weights: of the model.
        layer: counted from 0 among the layers with a state.
        prefix: of the names of its tensors.
    """
    mamba, fp32 = config.mamba, torch.float32
    assert mamba is not None, "the family has Mamba2"
    groups = ops.shard.of(mamba.groups)
    heads = channels(groups, mamba.heads // mamba.groups)
    inner = mamba.inner, channels(heads, mamba.head_dim)
    rows = mamba.groups * mamba.state_size, channels(groups, mamba.state_size)
    steps = mamba.heads, heads
    own, mixed = columns(inner, inner, rows, rows, steps), columns(inner, rows, rows)
    bias, hidden = mamba.proj_bias, config.hidden_size
    # Rounded, steps would change what a state forgets.
    projection = load_linear(
        ops, weights, [f"{prefix}in_proj"], (mamba.projected,), hidden, bias=bias, own=own, plain_rows=mamba.heads
    )
    out = load_linear(ops, weights, [f"{prefix}out_proj"], (hidden,), mamba.inner, bias=bias, inputs=inner[1])
    conv = lazy_tensor(weights, f"{prefix}conv1d.weight", (mamba.channels, 1, mamba.taps)).take(0, mixed).read()
    if config.multipliers:
        sizes = [len(part) for _, part in (inner, inner, rows, rows, steps)]
        projection = scaled(projection, config.multipliers.of_mamba, sizes, conv)
        out = scaled(out, [config.multipliers.mamba_out], [hidden], conv)
    conv_bias = None
    if mamba.conv_bias:
        conv_bias = lazy_tensor(weights, f"{prefix}conv1d.bias", (mamba.channels,)).take(0, mixed).read()

    def of_heads(name: str, fill: float) -> Tensor:
        return weights.get(prefix + name, (mamba.heads,), dtype=fp32, fill=fill, take=Take.of(0, heads, mamba.heads))

    spec = MambaSpec(
        layer=layer,
        heads=len(heads),
        head_dim=mamba.head_dim,
        groups=len(groups),
        state_size=mamba.state_size,
        weights=MambaWeights(
            conv=conv[:, 0].contiguous(),
            conv_bias=conv_bias,
            log_rate=of_heads("A_log", 0.0),
            dt_bias=of_heads("dt_bias", 1.0),
            skip=of_heads("D", 1.0),
        ),
    )
    norm = None
    if mamba.norm:
        take = Take.of(0, inner[1], mamba.inner)
        norm = weights.get(f"{prefix}norm.weight", (mamba.inner,), fill=1.0, take=take)
    return Mamba(ops, projection, spec, norm, config.norm_eps, out)
