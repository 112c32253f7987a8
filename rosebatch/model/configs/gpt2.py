"""GPT-2's config.json."""

from collections.abc import Mapping
from typing import Any

from rosebatch.model.configs.fields import size, supported
from rosebatch.ops.ops import ACTIVATIONS


def gpt2(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    hidden, layers, heads = (size(values, name) for name in ("n_embd", "n_layer", "n_head"))
    head_dim = hidden // heads
    scale = head_dim**-0.5 if values.get("scale_attn_weights", True) else 1.0
    by_layer = values.get("scale_attn_by_inverse_layer_idx", False)
    return {
        "family": "gpt2",
        "vocab_size": values["vocab_size"],
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": heads,
        "head_dim": head_dim,
        "intermediate_size": values.get("n_inner") or 4 * hidden,
        "max_model_len": values.get("n_positions", 1024),
        "norm_eps": values.get("layer_norm_epsilon", 1e-5),
        "activation": supported("activation_function", values.get("activation_function", "gelu_new"), ACTIVATIONS),
        "tie_word_embeddings": values.get("tie_word_embeddings", True),
        "qkv_bias": True,
        "out_bias": True,
        "mlp_bias": True,
        "attention_scales": [scale / (i + 1 if by_layer else 1) for i in range(layers)],
    }
