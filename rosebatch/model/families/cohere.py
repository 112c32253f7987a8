"""Command R and Command R7B: attention and MLP in parallel, norms without bias, rotation of neighbouring channels."""

from torch import Tensor

from rosebatch.model.families.layer_norm_decoder import LayerNormDecoder
from rosebatch.model.rope import interleaved_qkv_order, pairs_to_halves
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import HeadLayerNorm


class Cohere(LayerNormDecoder):
    """See ``LayerNormDecoder``."""

    norm_bias = False

    def qkv_order(self) -> Tensor:
        """See ``interleaved_qkv_order``."""
        return interleaved_qkv_order(self.config)

    def load_qk_norm(self, prefix: str, weights: WeightSource) -> HeadLayerNorm:
        """See ``HeadLayerNorm``; the weights follow the order of the channels."""
        c, order = self.config, pairs_to_halves(self.config)

        def load(name: str, heads: int, own: range) -> Tensor:
            weight = weights.get(f"{prefix}self_attn.{name}_norm.weight", (heads, c.head_dim), fill=1.0)
            return weight[own.start : own.stop, order.to(weight.device)].contiguous()

        q_weight = load("q", c.num_heads, self.ops.shard.of(c.num_heads))
        k_weight = load("k", c.num_kv_heads, self.ops.shard.kv_heads(c.num_kv_heads))
        return HeadLayerNorm(q_weight, k_weight, c.norm_eps)
