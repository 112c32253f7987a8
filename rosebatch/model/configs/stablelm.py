"""StableLM's config.json."""

from collections.abc import Mapping
from typing import Any

from rosebatch.model.configs.fields import decoder
from rosebatch.model.configs.rope import rope, rotary_dim, rotary_share

# Of transformers' config class.
STABLELM_DEFAULTS = {
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5,
    "num_key_value_heads": 32,
    "eos_token_id": 0,
    "hidden_act": "silu",
}


def stablelm(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    fields = decoder(values, "stablelm", eps="layer_norm_eps")
    return fields | {
        "qkv_bias": values.get("use_qkv_bias", False),
        "qk_norm": values.get("qk_layernorm", False),
        "parallel_residual": values.get("use_parallel_residual", False),
        "rope": rope(values),
        "rotary_dim": rotary_dim(fields["head_dim"], rotary_share(values, 0.25)),
    }
