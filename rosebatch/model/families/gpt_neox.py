"""GPT-NeoX and Pythia: a plain MLP; attention and MLP in parallel, each with its own norm."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rosebatch.model.families.layer_norm_decoder import LayerNormDecoder
from rosebatch.model.family import Architecture, Family
from rosebatch.model.hf_fields import attention_biases, decoder
from rosebatch.model.hf_rope import rope, rotary_dim, rotary_share
from rosebatch.model.sublayers import MLP, load_plain_mlp
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import ACTIVATIONS


class GPTNeoX(LayerNormDecoder):
    """See ``LayerNormDecoder``."""

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


# Defaults of transformers' config class.
_DEFAULTS = {
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "attention_bias": True,
}


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; all heads have K and V of their own."""
    values = {**values, "num_key_value_heads": None, "head_dim": None}
    fields = decoder(values, "gpt_neox", eps="layer_norm_eps", activations=ACTIVATIONS)
    return fields | {
        **attention_biases(values),
        "mlp_bias": True,
        "parallel_residual": values.get("use_parallel_residual", True),
        "rope": rope(values, theta_name="rotary_emb_base"),
        "rotary_dim": rotary_dim(fields["head_dim"], rotary_share(values, 0.25, "rotary_pct")),
    }


ARCHITECTURES = {"GPTNeoXForCausalLM": Architecture("gpt_neox", "GPT-NeoX, Pythia", _parse, _DEFAULTS)}
FAMILY = Family("gpt_neox", GPTNeoX, mlp_matrices=2)
