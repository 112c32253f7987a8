"""Starcoder 2's config.json."""

from collections.abc import Mapping
from typing import Any

from rosebatch.model.configs.fields import decoder, windows
from rosebatch.model.configs.rope import whole_rope
from rosebatch.ops.ops import ACTIVATIONS

# Of transformers' config class.
STARCODER2_DEFAULTS = {
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "num_key_value_heads": 2,
    "eos_token_id": 50256,
    "hidden_act": "gelu_pytorch_tanh",
    "use_bias": True,
    "tie_word_embeddings": True,
}


def starcoder2(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    fields = decoder(values, "starcoder2", eps="norm_epsilon", activations=ACTIVATIONS)
    bias, window = values["use_bias"], values.get("sliding_window")
    return fields | {
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
        "sliding_windows": windows(values, ["sliding_attention"] * fields["num_layers"]) if window else [],
        "rope": whole_rope(values),
    }
