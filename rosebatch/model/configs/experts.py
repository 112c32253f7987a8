"""config.json of families with experts: Qwen2-MoE, Qwen3-MoE and Mixtral."""

from collections.abc import Mapping
from typing import Any

from rosebatch.host.model_files import shown
from rosebatch.model.configs.fields import size, supported
from rosebatch.model.configs.llama import MISTRAL_DEFAULTS, mistral, qwen2, qwen3
from rosebatch.model.configs.rope import whole_rope
from rosebatch.ops.ops import EXPERT_GATES

# Of transformers' config classes.
_QWEN_DEFAULTS = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "sliding_window": 4096,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
}
QWEN2_MOE_DEFAULTS = {
    **_QWEN_DEFAULTS,
    "intermediate_size": 5632,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
QWEN3_MOE_DEFAULTS = {
    **_QWEN_DEFAULTS,
    "intermediate_size": 6144,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
MIXTRAL_DEFAULTS = {
    **MISTRAL_DEFAULTS,
    "rms_norm_eps": 1e-5,
    "sliding_window": None,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}

_MIXTRAL_THETA = 1e6
# Types of layers, by whether they have a window.
_KINDS = ("full_attention", "sliding_attention")


def qwen2_moe(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; a shared expert beside the routed ones."""
    if not values.get("layer_types"):
        first = values.get("max_window_layers", 28)
        kinds = [_KINDS[i % 2 == 0 and i < first] for i in range(size(values, "num_hidden_layers"))]
        values = {**values, "layer_types": kinds}
    fields = qwen2(values) | {"qkv_bias": values.get("qkv_bias", True)}
    return fields | {"experts": qwen_experts(values, fields["num_layers"], shared=True)}


def qwen3_moe(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``. A window, if there is one, is in every layer."""
    fields = qwen3({**values, "max_window_layers": 0, "layer_types": None})
    return fields | {"experts": qwen_experts(values, fields["num_layers"], shared=False)}


def mixtral(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; experts in every layer."""
    fields = mistral(values)
    supported("hidden_act", values["hidden_act"], EXPERT_GATES)
    experts = {
        "layers": [True] * fields["num_layers"],
        "num_experts": size(values, "num_local_experts"),
        "experts_per_token": size(values, "num_experts_per_tok"),
        "expert_size": size(values, "intermediate_size"),
    }
    return fields | {
        "family": "mixtral",
        "rope": whole_rope({"rope_theta": _MIXTRAL_THETA, **values}),
        "experts": experts,
    }


def qwen_experts(values: Mapping[str, Any], layers: int, *, shared: bool) -> dict[str, Any] | None:
    """The fields of ``ExpertsConfig`` as all Qwens write them; None where no layer has experts."""
    # transformers 5 writes one name or the other.
    count = values.get("num_local_experts", values["num_experts"])
    dense, step = values.get("mlp_only_layers") or [], values["decoder_sparse_step"]
    if not isinstance(dense, list) or type(step) is not int or step < 1:
        raise ValueError(f"decoder_sparse_step or mlp_only_layers is impossible: {shown(step)}, {shown(dense)}")
    has = [bool(count) and i not in dense and (i + 1) % step == 0 for i in range(layers)]
    if not any(has):
        return None
    supported("hidden_act", values["hidden_act"], EXPERT_GATES)
    return {
        "layers": has,
        "num_experts": size({"num_experts": count}, "num_experts"),
        "experts_per_token": size(values, "num_experts_per_tok"),
        "expert_size": size(values, "moe_intermediate_size"),
        "normalize": values["norm_topk_prob"],
        "shared_size": size(values, "shared_expert_intermediate_size") if shared else 0,
        "shared_gate": shared,
    }
