"""Paged attention with its projections, as a sub-layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.model.contract import Attention, rows_of
from rosebatch.model.mixers.paged_attention.mixer import PagedAttentionSpec
from rosebatch.model.rope import Rotary
from rosebatch.model.sublayers import SelfAttention, load_projections
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import Linear, Ops, Partial, QKNorm, WholeRMSNorm


@dataclass(frozen=True, slots=True)
class GatedAttention:
    """q, k, v and a gate of the normed input in one product, attention times sigmoid(gate), a last product."""

    ops: Ops
    qkv: Linear
    spec: PagedAttentionSpec
    out: Linear

    def __call__(self, normed: Tensor, attention: Attention, wanted: Tensor | None = None) -> Partial:
        """See ``rosebatch.model.sublayers.Mixer``."""
        spec = self.spec
        size = spec.num_heads * spec.head_dim
        qkv, gate = self.qkv(normed).split([size + 2 * spec.num_kv_heads * spec.head_dim, size], 1)
        attended = attention(spec, qkv, wanted=wanted)
        return self.ops.project(self.out, self.ops.sigmoid_mul(attended, rows_of(gate, wanted)))


def load_paged_attention(
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
    gated: bool = False,
    transposed: bool = False,
    shared: int | None = None,
) -> SelfAttention | GatedAttention:
    """The attention of a layer.

    Args:
        config, ops, weights: of the model.
        layer: counted from 0 among those with attention.
        qkv_names, out_name: of the projections; see ``load_linear``.
        rotary, qk_norm, sinks: see ``PagedAttentionSpec``; those of the process's own heads.
        qkv_order: the rows of q, k and v, in the order that attention wants; None for the stored order.
        transposed: see ``load_weight``.
        shared: the layer whose K and V it reads, counted as ``layer``; None if it has its own.
        gated: whether the first projection has a gate for each of q's channels, a head's after its q.
    """
    c = config
    if gated:
        rows = torch.arange(2 * c.num_heads * c.head_dim).view(c.num_heads, 2, c.head_dim)
        kv_rows = rows.numel() + torch.arange(2 * c.num_kv_heads * c.head_dim)
        qkv_order = torch.cat((rows[:, 0].flatten(), kv_rows, rows[:, 1].flatten()))
    heads, kv_heads, qkv, out = load_projections(
        c, ops, weights, qkv_names, out_name, order=qkv_order, gated=gated, transposed=transposed, keys=shared is None
    )
    if isinstance(qk_norm, WholeRMSNorm) and ops.shard.size > 1:
        # It needs the channels of all processes: no kernel of attention has them.
        qkv, qk_norm = ops.whole_norm(qkv, qk_norm), None
    spec = PagedAttentionSpec(
        layer=layer if shared is None else shared,
        shares=shared is not None,
        num_heads=len(heads),
        num_kv_heads=len(kv_heads),
        head_dim=c.head_dim,
        scale=c.attention_scale(layer),
        window=c.sliding_window(layer),
        soft_cap=c.attention_soft_cap,
        sinks=sinks,
        e4m3=c.stores_e4m3(c.sliding_window(layer)),
        qk_norm=qk_norm,
        rotary=rotary,
    )
    return (GatedAttention if gated else SelfAttention)(ops, qkv, spec, out)
