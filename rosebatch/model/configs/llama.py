"""config.json of the families that ``rosebatch.model.families.llama`` builds as they are."""

from collections.abc import Mapping
from typing import Any

from rosebatch.host.model_files import shown
from rosebatch.model.configs.fields import decoder, layer_types, windows
from rosebatch.model.configs.rope import whole_rope

# Of transformers' config classes.
LLAMA_DEFAULTS = {"max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "eos_token_id": 2, "hidden_act": "silu"}
MISTRAL_DEFAULTS = {
    **LLAMA_DEFAULTS,
    "max_position_embeddings": 4096 * 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}
QWEN2_DEFAULTS = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "hidden_act": "silu",
}
QWEN3_DEFAULTS = {**QWEN2_DEFAULTS, "head_dim": 128}
GRANITE_DEFAULTS = LLAMA_DEFAULTS
SMOLLM3_DEFAULTS = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 4,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
_SMOLLM3_THETA = 2_000_000.0


def llama(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    return decoder(values, "llama") | _biases(values) | {"rope": whole_rope(values)}


def mistral(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; a window in every layer."""
    fields, window = decoder(values, "llama"), values.get("sliding_window")
    sliding = windows(values, ["sliding_attention"] * fields["num_layers"]) if window else []
    return fields | {"sliding_windows": sliding, "rope": whole_rope(values)}


def qwen2(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; biases of q, k and v."""
    fields = decoder(values, "llama") | {"qkv_bias": True, "rope": whole_rope(values)}
    return fields | {"sliding_windows": _qwen_windows(values)}


def qwen3(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; norms of q and k."""
    bias = values.get("attention_bias", False)
    fields = decoder(values, "llama") | {"qkv_bias": bias, "out_bias": bias, "qk_norm": True}
    return fields | {"rope": whole_rope(values), "sliding_windows": _qwen_windows(values)}


def granite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; multipliers in four places."""
    fields = llama(values)
    return fields | {
        "attention_scales": [values.get("attention_multiplier", 1.0)] * fields["num_layers"],
        "embedding_multiplier": values.get("embedding_multiplier", 1.0),
        "residual_multiplier": values.get("residual_multiplier", 1.0),
        "logit_multiplier": 1 / values.get("logits_scaling", 1.0),
    }


def smollm3(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; some layers have no positions, and only these may have a window."""
    fields = decoder(values, "llama") | _biases(values)
    layers = fields["num_layers"]
    rotary = values.get("no_rope_layers")
    if rotary is None:
        interval = values.get("no_rope_layer_interval", 4)
        rotary = [(i + 1) % interval != 0 for i in range(layers)]
    if not isinstance(rotary, list) or any(value not in (0, 1) for value in rotary):
        raise ValueError(f"no_rope_layers must be a list of 0 and 1, got {shown(rotary)}")
    fields |= {"rope": whole_rope({"rope_theta": _SMOLLM3_THETA, **values}), "rotary_layers": [bool(r) for r in rotary]}
    if values.get("use_sliding_window") and values.get("sliding_window"):
        kinds = layer_types(values, ["full_attention" if r else "sliding_attention" for r in rotary])
        fields["sliding_windows"] = windows(values, kinds)
    return fields


def _biases(values: Mapping[str, Any]) -> dict[str, Any]:
    attention = values.get("attention_bias", False)
    return {"qkv_bias": attention, "out_bias": attention, "mlp_bias": values.get("mlp_bias", False)}


def _qwen_windows(values: Mapping[str, Any]) -> list[int]:
    if not values.get("use_sliding_window") or not values.get("sliding_window"):
        return []
    first, layers = values.get("max_window_layers", 28), values["num_hidden_layers"]
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return windows(values, layer_types(values, default))
