"""config.json of Cohere's Command R, R+ and R7B."""

from collections.abc import Mapping
from typing import Any

from rosebatch.model.configs.fields import decoder, every, layer_types, windows
from rosebatch.model.configs.rope import whole_rope

# Of transformers' config classes.
COHERE_DEFAULTS = {
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "eos_token_id": 255001,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
COHERE2_DEFAULTS = {**COHERE_DEFAULTS, "sliding_window": 4096}
_COHERE_THETA = 500_000.0


def cohere(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    rope = whole_rope({"rope_theta": _COHERE_THETA, **values})
    return _cohere(values) | {"qk_norm": values.get("use_qk_norm", False), "rope": rope}


def cohere2(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; layers without a window have no positions."""
    fields = _cohere(values)
    kinds = layer_types(values, every(values.get("sliding_window_pattern", 4), fields["num_layers"]))
    return fields | {
        "sliding_windows": windows(values, kinds),
        "rotary_layers": [kind == "sliding_attention" for kind in kinds],
        "rope": whole_rope(values),
    }


def _cohere(values: Mapping[str, Any]) -> dict[str, Any]:
    bias = values.get("attention_bias", False)
    return decoder(values, "cohere", eps="layer_norm_eps") | {
        "qkv_bias": bias,
        "out_bias": bias,
        "parallel_residual": True,
        "logit_multiplier": values["logit_scale"],
    }
