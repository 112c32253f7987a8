"""Bidirectional attention with its projections, as a sub-layer."""

from collections.abc import Sequence

from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.model.mixers.bidirectional_attention.mixer import BidirectionalSpec
from rosebatch.model.rope import Rotary
from rosebatch.model.sublayers import SelfAttention, channels, columns, load_linear
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
    q_size, kv_size = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    sizes = (q_size, kv_size, kv_size)
    heads, kv_heads = ops.shard.of(c.num_heads), ops.shard.kv_heads(c.num_kv_heads)
    q, kv = channels(heads, c.head_dim), channels(kv_heads, c.head_dim)
    own = columns((q_size, q), (kv_size, kv), (kv_size, kv))
    qkv = load_linear(ops, weights, qkv_names, sizes, c.hidden_size, bias=c.qkv_bias, own=own)
    out = load_linear(ops, weights, [out_name], (c.hidden_size,), q_size, bias=c.out_bias, inputs=q)
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
