"""config.json of GPT-NeoX and Pythia."""

from collections.abc import Mapping
from typing import Any

from rosebatch.model.configs.fields import decoder
from rosebatch.model.configs.rope import rope, rotary_dim, rotary_share
from rosebatch.ops.ops import ACTIVATIONS

# Of transformers' config class.
GPT_NEOX_DEFAULTS = {
    "max_position_embeddings": 2048,
    "layer_norm_eps": 1e-5,
    "eos_token_id": 2,
    "hidden_act": "gelu",
    "attention_bias": True,
}


def gpt_neox(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; all heads have K and V of their own."""
    values = {**values, "num_key_value_heads": None, "head_dim": None}
    fields = decoder(values, "gpt_neox", eps="layer_norm_eps", activations=ACTIVATIONS)
    return fields | {
        "qkv_bias": values["attention_bias"],
        "out_bias": values["attention_bias"],
        "mlp_bias": True,
        "parallel_residual": values.get("use_parallel_residual", True),
        "rope": rope(values, theta_name="rotary_emb_base"),
        "rotary_dim": rotary_dim(fields["head_dim"], rotary_share(values, 0.25, "rotary_pct")),
    }
