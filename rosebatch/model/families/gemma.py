"""Gemma 2 and 3 (text): norms before and behind each sub-layer, whose weights are stored less one."""

import torch
from torch import Tensor

from rosebatch.model.families.llama import Llama
from rosebatch.model.weights import WeightSource


class Gemma(Llama):
    """See ``Llama``."""

    post_attention_norm_name = "post_attention_layernorm"
    mlp_norm_name = "pre_feedforward_layernorm"
    post_mlp_norm_name = "post_feedforward_layernorm"

    def load_norm(self, name: str, size: int, weights: WeightSource) -> Tensor:
        """``1 + weight`` in fp32: only the normed result is rounded."""
        return 1 + weights.get(f"{name}.weight", (size,), dtype=torch.float32, fill=0.0)
