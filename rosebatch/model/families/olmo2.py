"""OLMo 2 and 3: norms behind each sub-layer and none before; one norm over all of q, and one over all of k."""

import torch
from torch import Tensor

from rosebatch.model.families.llama import Llama
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import WholeRMSNorm


class Olmo2(Llama):
    """See ``Llama``."""

    input_norm_name = None
    post_attention_norm_name = "post_attention_layernorm"
    mlp_norm_name = None
    post_mlp_norm_name = "post_feedforward_layernorm"

    def load_norm(self, name: str, size: int, weights: WeightSource) -> Tensor:
        """In fp32: only the normed result is rounded."""
        return weights.get(f"{name}.weight", (size,), dtype=torch.float32, fill=1.0)

    def load_qk_norm(self, prefix: str, weights: WeightSource) -> WholeRMSNorm:
        """See ``Llama``."""
        c, shard = self.config, self.ops.shard

        def load(name: str, heads: int, own: range) -> Tensor:
            weight = self.load_norm(f"{prefix}self_attn.{name}_norm", heads * c.head_dim, weights)
            return weight[own.start * c.head_dim : own.stop * c.head_dim].contiguous()

        q_weight = load("q", c.num_heads, shard.of(c.num_heads))
        k_weight = load("k", c.num_kv_heads, shard.kv_heads(c.num_kv_heads))
        return WholeRMSNorm(q_weight, k_weight, c.norm_eps)
