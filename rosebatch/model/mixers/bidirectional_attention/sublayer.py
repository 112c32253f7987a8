"""Bidirectional attention with its projections, as a sub-layer."""

from collections.abc import Sequence

from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.model.mixers.bidirectional_attention.mixer import BidirectionalSpec
from rosebatch.model.rope import Rotary
from rosebatch.model.sublayers import SelfAttention, load_projections
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import Ops, QKNorm


def load_bidirectional_attention(
    config: ModelConfig,
    ops: Ops,
    weights: WeightSource,
    layer: int,
    qkv_names: Sequence[str],
    out_name: str,
    *,
    rotary: Rotary | None = None,
    qk_norm: QKNorm | None = None,
    bias: Tensor | None = None,
) -> SelfAttention:
    """The attention of a layer; see ``load_linear`` for the names, and ``BidirectionalSpec`` for the options.

    Args:
        bias: of all heads.
    """
    c = config
    heads, kv_heads, qkv, out = load_projections(c, ops, weights, qkv_names, out_name)
    spec = BidirectionalSpec(
        layer=layer,
        num_heads=len(heads),
        num_kv_heads=len(kv_heads),
        head_dim=c.head_dim,
        scale=c.attention_scale(layer),
        window=c.sliding_window(layer),
        qk_norm=qk_norm,
        rotary=rotary,
        bias=None if bias is None else bias[heads.start : heads.stop].contiguous(),
    )
    return SelfAttention(ops, qkv, spec, out)
