"""StableLM: a gated MLP; rotary positions on a part of each head; in some models a norm of each head of q and k."""

import torch
from torch import Tensor

from rosebatch.model.families.layer_norm_decoder import LayerNormDecoder
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import HeadLayerNorm


class StableLM(LayerNormDecoder):
    """See ``LayerNormDecoder``."""

    def load_qk_norm(self, prefix: str, weights: WeightSource) -> HeadLayerNorm:
        """Checkpoints hold a weight for each head."""
        c = self.config

        def load(name: str, heads: range) -> Tensor:
            names = [f"{prefix}self_attn.{name}_layernorm.norms.{head}.weight" for head in heads]
            return torch.stack([weights.get(name, (c.head_dim,), fill=1.0) for name in names])

        shard = self.ops.shard
        return HeadLayerNorm(load("q", shard.of(c.num_heads)), load("k", shard.kv_heads(c.num_kv_heads)), c.norm_eps)
