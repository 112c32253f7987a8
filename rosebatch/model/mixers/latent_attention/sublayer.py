"""Latent attention with its projections, as a sub-layer."""

from dataclasses import dataclass

import torch
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.model.contract import Attention
from rosebatch.model.mixers.latent_attention.mixer import LatentSpec
from rosebatch.model.quantization.forms import load_weight
from rosebatch.model.rope import Rotary
from rosebatch.model.sublayers import channels, columns, load_linear
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import Linear, Ops, Partial

# Of the norms within attention: transformers' classes have no other.
_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """q and latents of the normed input in one product, attention, a last product.

    Attributes:
        down: what q is made of, or q itself; then the latent, and its key that is rotated.
        q_norm, q_up: of what q is made of; None where ``down`` makes q.
    """

    ops: Ops
    down: Linear
    q_norm: Tensor | None
    q_up: Linear | None
    spec: LatentSpec
    out: Linear

    def __call__(self, normed: Tensor, attention: Attention, wanted: Tensor | None = None) -> Partial:
        """See ``rosebatch.model.sublayers.Mixer``."""
        spec = self.spec
        made = self.down(normed)
        q, latents = made[:, : -spec.width], made[:, -spec.width :]
        if self.q_up is not None:
            assert self.q_norm is not None
            q = self.q_up(self.ops.rms_norm(q, self.q_norm, _EPS))
        attended = attention(spec, q.unflatten(1, (spec.num_heads, -1)), latents, wanted=wanted)
        return self.ops.project(self.out, attended.flatten(1))


def load_latent_attention(
    config: ModelConfig, ops: Ops, weights: WeightSource, layer: int, prefix: str, rotary: Rotary | None
) -> LatentAttention:
    """The attention of a layer. A process of several has some heads, and all of each latent.

    Args:
        config, ops, weights: of the model.
        layer: counted from 0 among those with attention.
        prefix: of the names of its tensors.
        rotary: tables of the channels that are rotated; None if positions are not rotary.
    """
    c, latent = config, config.latent
    assert latent is not None, "the family has latents"
    rank, size, rotated = latent.rank, c.head_dim, c.rotary_dim
    heads = ops.shard.of(c.num_heads)
    nope, q_size, width = size - rotated, c.num_heads * size, rank + rotated
    halves = torch.arange(rotated)
    if latent.interleaved:
        halves = halves.view(-1, 2).t().flatten()
    # In this order, channel i is rotated with i + rotated / 2, of q and of keys alike, which leaves q·k as it was.
    q_order = (torch.arange(q_size).view(-1, size)[:, torch.cat((torch.arange(nope), nope + halves))]).flatten()
    key_order = torch.cat((torch.arange(rank), rank + halves))
    own = channels(heads, size)
    names = ["q_a_proj" if latent.q_rank else "q_proj", "kv_a_proj_with_mqa"]
    first = torch.arange(latent.q_rank) if latent.q_rank else q_order
    down = load_linear(
        ops,
        weights,
        [f"{prefix}{name}" for name in names],
        (len(first), width),
        c.hidden_size,
        bias=False,
        order=torch.cat((first, len(first) + key_order)),
        own=columns((len(first), range(len(first)) if latent.q_rank else own), (width, range(width))),
    )
    q_norm = q_up = None
    if latent.q_rank:
        q_norm = weights.get(f"{prefix}q_a_layernorm.weight", (latent.q_rank,), fill=1.0)
        q_up = load_linear(
            ops,
            weights,
            [f"{prefix}q_b_proj"],
            (q_size,),
            latent.q_rank,
            bias=False,
            order=q_order,
            own=columns((q_size, own)),
        )
    both = nope + latent.value_dim
    shape = c.num_heads * both, rank
    up = load_weight(weights, f"{prefix}kv_b_proj.weight", shape).rows(channels(heads, both)).dense()
    of_keys, of_values = up.view(len(heads), both, rank).split((nope, latent.value_dim), 1)
    of_keys, of_values = of_keys.transpose(1, 2).contiguous(), of_values.contiguous()
    spec = LatentSpec(
        layer=layer,
        num_heads=len(heads),
        rank=rank,
        width=width,
        scale=c.attention_scale(layer),
        of_keys=of_keys,
        of_values=of_values,
        absorb=ops.each_head(of_keys),
        expand=ops.each_head(of_values),
        norm=weights.get(f"{prefix}kv_a_layernorm.weight", (rank,), fill=1.0),
        eps=_EPS,
        rotary=rotary,
    )
    value_size, values = c.num_heads * latent.value_dim, channels(heads, latent.value_dim)
    return LatentAttention(
        ops=ops,
        down=down,
        q_norm=q_norm,
        q_up=q_up,
        spec=spec,
        out=load_linear(ops, weights, [f"{prefix}o_proj"], (c.hidden_size,), value_size, bias=False, inputs=values),
    )
