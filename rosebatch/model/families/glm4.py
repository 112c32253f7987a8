"""GLM-4 (0414): norms before and behind each sub-layer; rotary positions turn neighbouring channels."""

from torch import Tensor

from rosebatch.model.families.llama import Llama
from rosebatch.model.rope import interleaved_qkv_order


class Glm4(Llama):
    """See ``Llama``."""

    gate_up_names = ("mlp.gate_up_proj",)
    post_attention_norm_name = "post_self_attn_layernorm"
    mlp_norm_name = "post_attention_layernorm"
    post_mlp_norm_name = "post_mlp_layernorm"

    def qkv_order(self) -> Tensor:
        """See ``interleaved_qkv_order``."""
        return interleaved_qkv_order(self.config)
