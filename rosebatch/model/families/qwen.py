"""Qwen2 and 3, with and without experts: a Llama with biases or norms of q and k."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rosebatch.config.classifier import ClassifierConfig, HeadLayer
from rosebatch.host.model_files import shown
from rosebatch.model.family import EACH, GGUF, Architecture, GGUFModel, integers
from rosebatch.model.gguf import decoder as gguf_decoder
from rosebatch.model.hf.fields import attention_biases, decoder, layer_types, size, supported, windows
from rosebatch.model.hf.rope import whole_rope
from rosebatch.ops.ops import EXPERT_GATES

# Defaults of transformers' config classes.
_QWEN2_DEFAULTS = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 32,
    "sliding_window": 4096,
    "hidden_act": "silu",
}
_QWEN3_DEFAULTS = {**_QWEN2_DEFAULTS, "head_dim": 128}
_MOE_DEFAULTS = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "sliding_window": 4096,
    "norm_topk_prob": False,
    "decoder_sparse_step": 1,
}
_QWEN2_MOE_DEFAULTS = {
    **_MOE_DEFAULTS,
    "intermediate_size": 5632,
    "num_key_value_heads": 16,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
}
_QWEN3_MOE_DEFAULTS = {
    **_MOE_DEFAULTS,
    "intermediate_size": 6144,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
}
# Types of layers, by whether they have a window.
_KINDS = ("full_attention", "sliding_attention")


def _parse_qwen2(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; biases of q, k and v."""
    fields = decoder(values, "llama") | {"qkv_bias": True, "rope": whole_rope(values)}
    return fields | {"sliding_windows": _windows(values)}


def _parse_qwen3(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; norms of q and k."""
    fields = decoder(values, "llama") | attention_biases(values)
    return fields | {"qk_norm": True, "rope": whole_rope(values), "sliding_windows": _windows(values)}


def _parse_qwen2_moe(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; a shared expert next to the routed ones."""
    if not values.get("layer_types"):
        first = values.get("max_window_layers", 28)
        kinds = [_KINDS[i % 2 == 0 and i < first] for i in range(size(values, "num_hidden_layers"))]
        values = {**values, "layer_types": kinds}
    fields = _parse_qwen2(values) | {"qkv_bias": values.get("qkv_bias", True)}
    return fields | {"experts": qwen_experts(values, fields["num_layers"], shared=True)}


def _parse_qwen3_moe(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``. A window, if there is one, is in every layer."""
    fields = _parse_qwen3({**values, "max_window_layers": 0, "layer_types": None})
    return fields | {"experts": qwen_experts(values, fields["num_layers"], shared=False)}


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


def _windows(values: Mapping[str, Any]) -> list[int]:
    if not values.get("use_sliding_window") or not values.get("sliding_window"):
        return []
    first, layers = values.get("max_window_layers", 28), values["num_hidden_layers"]
    default = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    return windows(values, layer_types(values, default))


GGUF_EXPERTS = {
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": f"mlp.experts.{EACH}.gate_proj",
    "ffn_up_exps": f"mlp.experts.{EACH}.up_proj",
    "ffn_down_exps": f"mlp.experts.{EACH}.down_proj",
}
GGUF_SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}


def _gguf_qwen2(model: GGUFModel) -> dict[str, Any]:
    """Its biases are no option."""
    return {**gguf_decoder.llama(model), "attention_bias": False, "mlp_bias": False}


def _gguf_qwen3(model: GGUFModel) -> dict[str, Any]:
    return {**gguf_decoder.llama(model), "mlp_bias": False}


def _gguf_qwen2_moe(model: GGUFModel) -> dict[str, Any]:
    return {**_gguf_qwen2(model), **gguf_experts(model, normalize=False), **gguf_shared_size(model)}


def _gguf_qwen3_moe(model: GGUFModel) -> dict[str, Any]:
    return {**_gguf_qwen3(model), **gguf_experts(model, normalize=True)}


def gguf_shared_size(model: GGUFModel) -> dict[str, Any]:
    """The size of the shared expert."""
    shared = model.get("expert_shared_feed_forward_length", 0) or model.need("feed_forward_length")
    return {"shared_expert_intermediate_size": shared}


def gguf_experts(model: GGUFModel, *, normalize: bool) -> dict[str, Any]:
    """Experts in all layers, as in llama.cpp. Their weights are normalized by architecture, if the file is silent."""
    used, size = model.need("expert_used_count", integers(1)), model.get("expert_feed_forward_length", 0)
    # A softmax over all experts.
    model.require("expert_gating_func", 1)
    model.require("expert_weights_scale", 1.0, 0.0)
    return {
        "num_experts": model.need("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": size or model.need("feed_forward_length") // used,
        "norm_topk_prob": model.get("expert_weights_norm", normalize),
    }


_ATTENTION = {**gguf_decoder.ATTENTION, **gguf_decoder.NORMS}
# Their rows of q and k are in transformers' order.
_GGUF_QWEN2 = GGUF(
    "qwen2",
    "model.layers",
    gguf_decoder.NAMES,
    {**_ATTENTION, **gguf_decoder.MLP},
    _gguf_qwen2,
    biases=lambda _: gguf_decoder.QKV,
)
_GGUF_QWEN3 = replace(
    _GGUF_QWEN2,
    architecture="qwen3",
    layer_names={**_ATTENTION, **gguf_decoder.MLP, **gguf_decoder.HEAD_NORMS},
    config=_gguf_qwen3,
    biases=gguf_decoder.biases,
)
_GGUF_QWEN2_MOE = replace(
    _GGUF_QWEN2,
    architecture="qwen2moe",
    layer_names={**_ATTENTION, **GGUF_EXPERTS, **GGUF_SHARED},
    config=_gguf_qwen2_moe,
    values=gguf_decoder.shared_gate,
)
_GGUF_QWEN3_MOE = replace(
    _GGUF_QWEN3,
    architecture="qwen3moe",
    layer_names={**_ATTENTION, **GGUF_EXPERTS, **gguf_decoder.HEAD_NORMS},
    config=_gguf_qwen3_moe,
)
_REWARD_LAYERS = (HeadLayer(name="score.0", activation="relu"), HeadLayer(name="score.2"))
# Of the classes that come with Qwen2.5-Math-RM and -PRM; <extra_0> ends a step (source: their model cards).
_REWARDS = {
    "ForRewardModel": ClassifierConfig(labels=("LABEL_0",), layers=_REWARD_LAYERS, activation="none"),
    "ForProcessRewardModel": ClassifierConfig(
        labels=("LABEL_0", "LABEL_1"), layers=_REWARD_LAYERS, pooling="all", step_token=151651
    ),
}
ARCHITECTURES = {
    "Qwen2ForCausalLM": Architecture(
        "qwen2",
        "Qwen2, Qwen2.5",
        _parse_qwen2,
        _QWEN2_DEFAULTS,
        window=True,
        gguf=(_GGUF_QWEN2,),
        rewards=_REWARDS,
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3",
        "Qwen3",
        _parse_qwen3,
        _QWEN3_DEFAULTS,
        window=True,
        gguf=(_GGUF_QWEN3,),
    ),
    "Qwen2MoeForCausalLM": Architecture(
        "qwen2_moe",
        "Qwen1.5-MoE, Qwen2-MoE",
        _parse_qwen2_moe,
        _QWEN2_MOE_DEFAULTS,
        window=True,
        experts=True,
        gguf=(_GGUF_QWEN2_MOE,),
    ),
    "Qwen3MoeForCausalLM": Architecture(
        "qwen3_moe",
        "Qwen3 with experts",
        _parse_qwen3_moe,
        _QWEN3_MOE_DEFAULTS,
        window=True,
        experts=True,
        gguf=(_GGUF_QWEN3_MOE,),
    ),
}
