"""config.json of Qwen3-Next and Qwen3.5. Folders of Qwen3.5 may hold a model of text and images: text is read."""

from collections.abc import Mapping
from typing import Any

from rosebatch.host.model_files import shown
from rosebatch.model.configs.experts import qwen_experts
from rosebatch.model.configs.fields import decoder, size, supported
from rosebatch.model.configs.rope import rope, rotary_dim, rotary_share

# Of transformers' config classes.
_DEFAULTS = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "full_attention_interval": 4,
}
QWEN3_NEXT_DEFAULTS = {
    **_DEFAULTS,
    "num_key_value_heads": 2,
    "intermediate_size": 5632,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
QWEN3_5_DEFAULTS = {**_DEFAULTS, "num_key_value_heads": 4}
QWEN3_5_MOE_DEFAULTS = {
    **_DEFAULTS,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}
_LAYER_TYPES = ("linear_attention", "full_attention")


def qwen3_next(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    fields = _decoder(values, "qwen3_next")
    return fields | {"experts": qwen_experts(values, fields["num_layers"], shared=True)}


def qwen3_5(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``. Positions of text are equal in all three parts of its rotary positions."""
    return _decoder(values, "qwen3_5")


def qwen3_5_moe(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; experts in every layer."""
    # No layer has a dense MLP.
    fields = _decoder({**values, "intermediate_size": values["moe_intermediate_size"]}, "qwen3_5")
    return fields | {"experts": qwen_experts(values, fields["num_layers"], shared=True)}


def _decoder(values: Mapping[str, Any], family: str) -> dict[str, Any]:
    fields = decoder(values, family)
    bias = values.get("attention_bias", False)
    return fields | {
        "qkv_bias": bias,
        "out_bias": bias,
        "qk_norm": True,
        "rope": rope(values),
        "rotary_dim": rotary_dim(fields["head_dim"], rotary_share(values, 0.25)),
        "delta": {
            "layers": [kind == "linear_attention" for kind in _layer_types(values, fields["num_layers"])],
            "key_heads": size(values, "linear_num_key_heads"),
            "value_heads": size(values, "linear_num_value_heads"),
            "key_dim": size(values, "linear_key_head_dim"),
            "value_dim": size(values, "linear_value_head_dim"),
            "taps": size(values, "linear_conv_kernel_dim"),
        },
    }


def _layer_types(values: Mapping[str, Any], layers: int) -> list[str]:
    given = values.get("layer_types")
    if given:
        return [supported("layer_types", kind, _LAYER_TYPES) for kind in given]
    interval = values["full_attention_interval"]
    if type(interval) is not int or interval < 1:
        raise ValueError(f"full_attention_interval must be a whole number > 0, got {shown(interval)}")
    return ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)]
