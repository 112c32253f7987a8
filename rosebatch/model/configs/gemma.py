"""config.json of Gemma 2 and 3. Gemma 3's folders may hold a model of text and images: its text part is read."""

from collections.abc import Mapping
from typing import Any

from rosebatch.model.configs.fields import decoder, every, layer_types, refuse, windows
from rosebatch.model.configs.rope import ropes_by_type, whole_rope

# Of transformers' config classes. Gemma 3's folders leave out sizes that equal them.
GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "eos_token_id": 1,
}
GEMMA2_DEFAULTS = {
    **GEMMA3_DEFAULTS,
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}


def gemma2(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    fields = _gemma(values, interval=2)
    return fields | {"attention_soft_cap": values["attn_logit_softcapping"] or 0.0, "rope": whole_rope(values)}


def gemma3(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; sliding layers have positions of their own."""
    # attn_logit_softcapping has no effect in transformers either.
    full, sliding = ropes_by_type(values, theta=1_000_000.0, sliding_theta=10_000.0)
    fields = _gemma(values, interval=values.get("sliding_window_pattern", 6))
    return fields | {"qk_norm": True, "rope": full, "sliding_rope": sliding}


def _gemma(values: Mapping[str, Any], interval: Any) -> dict[str, Any]:
    refuse(values, "use_bidirectional_attention")
    fields = decoder(values, "gemma", activation="hidden_activation")
    bias, layers = values.get("attention_bias", False), fields["num_layers"]
    return fields | {
        "qkv_bias": bias,
        "out_bias": bias,
        "sliding_windows": windows(values, layer_types(values, every(interval, layers))),
        "attention_scales": [values["query_pre_attn_scalar"] ** -0.5] * layers,
        "logit_soft_cap": values.get("final_logit_softcapping") or 0.0,
        "embedding_multiplier": fields["hidden_size"] ** 0.5,
    }
