"""OLMo 2 and 3: norms behind each sub-layer and none before; one norm over all of q, and one over all of k."""

import torch
from torch import Tensor

from rosebatch.model.llama import Llama
from rosebatch.model.weights import WeightSource


class Olmo2(Llama):
    """See ``Llama``."""

    input_norm_name = None
    post_attention_norm_name = "post_attention_layernorm"
    mlp_norm_name = None
    post_mlp_norm_name = "post_feedforward_layernorm"

    def load_norm(self, name: str, size: int, weights: WeightSource) -> Tensor:
        """In fp32: only the normed result is rounded."""
        return weights.get(f"{name}.weight", (size,), dtype=torch.float32, fill=1.0)
