"""GPT-NeoX and Pythia: a plain MLP; attention and MLP in parallel, each with its own norm."""

import torch
from torch import Tensor

from rosebatch.model.families.layer_norm_decoder import LayerNormDecoder
from rosebatch.model.sublayers import MLP, load_plain_mlp
from rosebatch.model.weights import WeightSource


class GPTNeoX(LayerNormDecoder):
    """See ``LayerNormDecoder``."""

    mlp_matrices = 2
    embedding_name = "gpt_neox.embed_in"
    layers_name = "gpt_neox.layers"
    norm_name = "gpt_neox.final_layer_norm"
    qkv_names = ("attention.query_key_value",)
    out_name = "attention.dense"

    def has_mlp_norm(self) -> bool:
        """In both forms of the layer."""
        return True

    def qkv_order(self) -> Tensor:
        """Checkpoints hold q, k and v of the first head, then those of the second, and so on."""
        heads, size = self.config.num_heads, self.config.head_dim
        return torch.arange(heads * 3 * size).view(heads, 3, size).transpose(0, 1).flatten()

    def load_mlp(self, prefix: str, weights: WeightSource) -> MLP:
        """See ``LayerNormDecoder``."""
        up_name, down_name = f"{prefix}mlp.dense_h_to_4h", f"{prefix}mlp.dense_4h_to_h"
        return load_plain_mlp(self.config, self.ops, weights, up_name, down_name)
