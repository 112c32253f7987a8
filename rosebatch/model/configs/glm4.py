"""config.json of GLM-4 (0414)."""

from collections.abc import Mapping
from typing import Any

from rosebatch.model.configs.fields import decoder
from rosebatch.model.configs.rope import rope, rotary_dim, rotary_share

# Of transformers' config class.
GLM4_DEFAULTS = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "eos_token_id": [151329, 151336, 151338],
    "attention_bias": True,
    "hidden_act": "silu",
}


def glm4(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    fields = decoder(values, "glm4")
    return fields | {
        "qkv_bias": values["attention_bias"],
        "rope": rope(values),
        "rotary_dim": rotary_dim(fields["head_dim"], rotary_share(values, 0.5)),
    }
