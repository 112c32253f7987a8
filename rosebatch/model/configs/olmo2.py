"""config.json of OLMo 2 and 3."""

from collections.abc import Mapping
from typing import Any

from rosebatch.model.configs.fields import decoder, every, layer_types, windows
from rosebatch.model.configs.rope import ropes_by_type, whole_rope

# Of transformers' config classes.
OLMO2_DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50279,
    "hidden_act": "silu",
}
OLMO3_DEFAULTS = {**OLMO2_DEFAULTS, "sliding_window": 4096}
_OLMO3_THETA = 500_000.0


def olmo2(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    return _olmo(values) | {"rope": whole_rope(values)}


def olmo3(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; three of four layers have a window and positions without scaling."""
    fields = _olmo(values)
    full, sliding = ropes_by_type(values, theta=_OLMO3_THETA, sliding_theta=values.get("rope_theta") or _OLMO3_THETA)
    kinds = layer_types(values, every(4, fields["num_layers"]))
    return fields | {"sliding_windows": windows(values, kinds), "rope": full, "sliding_rope": sliding}


def _olmo(values: Mapping[str, Any]) -> dict[str, Any]:
    bias = values.get("attention_bias", False)
    return decoder(values, "olmo2") | {"qkv_bias": bias, "out_bias": bias, "qk_norm": True}
