"""HP1's config.json: a format of our own, which transformers does not have."""

from collections.abc import Mapping
from typing import Any

from rosebatch.model.configs.fields import refuse, size, supported
from rosebatch.model.configs.rope import whole_rope


def hp1(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    refuse(values, "attention_bias", "mlp_bias", "use_sliding_window")
    hidden, layers, heads = (size(values, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    return {
        "family": "hp1",
        "vocab_size": values["vocab_size"],
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": values.get("num_key_value_heads") or heads,
        "head_dim": values.get("head_dim") or hidden // heads,
        "intermediate_size": values["intermediate_size"],
        "max_model_len": values["max_position_embeddings"],
        "activation": supported("hidden_act", values.get("hidden_act", "relu"), ("relu",)),
        "tie_word_embeddings": values.get("tie_word_embeddings", False),
        "rope": whole_rope(values),
        "hp1": {name: values[name] for name in ("fir_k", "relu_pre", "clip_min", "clip_max") if name in values},
    }
