"""DeepSeek V2 and V3, and GLM-4.7-Flash: latent attention, and experts in most layers; Llama's layers otherwise."""

import math
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from rosebatch.config.model import ModelConfig
from rosebatch.host.model_files import shown
from rosebatch.model.experts import ExpertNames
from rosebatch.model.families.llama import Llama
from rosebatch.model.families.qwen import GGUF_EXPERTS
from rosebatch.model.family import GGUF, Architecture, Family, GGUFModel, integers
from rosebatch.model.gguf import decoder as gguf_decoder
from rosebatch.model.gguf import latents as gguf_latents
from rosebatch.model.hf.fields import decoder, decoder_values, refuse, size, supported
from rosebatch.model.hf.rope import rope_members, whole_rope
from rosebatch.model.mixers.latent_attention.sublayer import load_latent_attention
from rosebatch.model.rope import Rotary
from rosebatch.model.sublayers import Mixer
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import EXPERT_GATES


class DeepSeek(Llama):
    """See ``Llama``."""

    expert_names = ExpertNames(shared="mlp.shared_experts")

    def load_mixer(self, index: int, prefix: str, rotary: Rotary | None, weights: WeightSource) -> Mixer:
        """See ``Llama``."""
        return load_latent_attention(self.config, self.ops, weights, index, f"{prefix}self_attn.", rotary)


# Defaults of transformers' config classes.
_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_V2_DEFAULTS = {
    **_DEFAULTS,
    "max_position_embeddings": 2048,
    "eos_token_id": 2,
    "first_k_dense_replace": 0,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "moe_intermediate_size": 1407,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
}
_V3_DEFAULTS = {
    **_DEFAULTS,
    "max_position_embeddings": 4096,
    "eos_token_id": 1,
    "first_k_dense_replace": 3,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "routed_scaling_factor": 2.5,
    "rope_interleave": True,
}
_GLM_DEFAULTS = {
    **_V3_DEFAULTS,
    "max_position_embeddings": 202752,
    "rms_norm_eps": 1e-5,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "moe_intermediate_size": 1536,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.8,
}
MLP_TYPES = ("dense", "sparse")


def latents(values: Mapping[str, Any], family: str, *, interleaved: bool) -> dict[str, Any]:
    """Fields of ``ModelConfig`` that all models with latents have; ``family`` and ``interleaved`` see there."""
    refuse(values, "attention_bias", "mlp_bias")
    heads, rotated = size(values, "num_attention_heads"), size(values, "qk_rope_head_dim")
    if values.get("num_key_value_heads", heads) not in (heads, None):
        raise ValueError(f"num_key_value_heads must be {heads}, as many as heads: each has keys of its own")
    head_dim = size(values, "qk_nope_head_dim") + rotated
    fields = decoder({**values, "num_key_value_heads": 1, "head_dim": head_dim}, family)
    return fields | {
        "rope": whole_rope(values),
        "rotary_dim": rotated,
        "attention_scales": _scales(values, head_dim, fields["num_layers"]),
        "latent": {
            "rank": size(values, "kv_lora_rank"),
            "value_dim": size(values, "v_head_dim"),
            "q_rank": 0 if values["q_lora_rank"] is None else size(values, "q_lora_rank"),
            "interleaved": interleaved,
        },
    }


def _scales(values: Mapping[str, Any], head_dim: int, layers: int) -> list[float]:
    """Factors on q·k: scaled positions may change them."""
    stored = rope_members(values)
    all_dim = stored.get("mscale_all_dim")
    if (stored.get("rope_type") or stored.get("type") or "default") == "default" or not all_dim:
        return []
    growth = 0.1 * all_dim * math.log(stored["factor"]) + 1.0 if stored["factor"] > 1 else 1.0
    return [head_dim**-0.5 * growth * growth] * layers


def _experts(values: Mapping[str, Any], layers: list[bool]) -> dict[str, Any]:
    """The fields of the experts in these layers."""
    if values.get("moe_layer_freq", 1) != 1:
        raise ValueError(f"moe_layer_freq {shown(values['moe_layer_freq'])} is not supported: take 1")
    supported("hidden_act", values["hidden_act"], EXPERT_GATES)
    expert_size = size(values, "moe_intermediate_size")
    return {
        "layers": layers,
        "num_experts": size(values, "n_routed_experts"),
        "experts_per_token": size(values, "num_experts_per_tok"),
        "expert_size": expert_size,
        "shared_size": expert_size * size(values, "n_shared_experts"),
        "weight_scale": values["routed_scaling_factor"],
        "wide_router": True,
    }


def behind_dense(values: Mapping[str, Any], layers: int) -> list[bool]:
    """Whether each layer has experts: all but the first ones."""
    dense = values["first_k_dense_replace"]
    if type(dense) is not int or dense < 0:
        raise ValueError(f"first_k_dense_replace must be a whole number >= 0, got {shown(dense)}")
    return [layer >= dense for layer in range(layers)]


def _parse_v2(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    # transformers' class does not read it.
    refuse(values, "norm_topk_prob")
    supported("scoring_func", values["scoring_func"], ("softmax",))
    method = supported("topk_method", values["topk_method"], ("greedy", "group_limited_greedy"))
    fields = latents(values, "deepseek", interleaved=True)
    experts = _experts(values, behind_dense(values, fields["num_layers"])) | {"normalize": False}
    if method == "group_limited_greedy":
        experts |= {"groups": size(values, "n_group"), "kept_groups": size(values, "topk_group")}
    return fields | {"experts": experts}


def _parse_v3(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    fields = latents(values, "deepseek", interleaved=bool(values["rope_interleave"]))
    return fields | {"experts": corrected_experts(values, behind_dense(values, fields["num_layers"]))}


def _parse_glm(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    fields = latents(values, "deepseek", interleaved=bool(values["rope_interleave"]))
    kinds = values.get("mlp_layer_types") or ["dense"] + ["sparse"] * (fields["num_layers"] - 1)
    layers = [supported("mlp_layer_types", kind, MLP_TYPES) == "sparse" for kind in kinds]
    return fields | {"experts": corrected_experts(values, layers)}


def corrected_experts(values: Mapping[str, Any], layers: list[bool]) -> dict[str, Any]:
    """The fields of experts that a sigmoid and a correction choose."""
    supported("scoring_func", values["scoring_func"], ("sigmoid",))
    supported("topk_method", values["topk_method"], ("noaux_tc",))
    return _experts(values, layers) | {
        "sigmoid": True,
        "normalize": values["norm_topk_prob"],
        "groups": size(values, "n_group"),
        "kept_groups": size(values, "topk_group"),
    }


def _hf_values(config: ModelConfig) -> dict[str, Any]:
    experts, values = config.experts, _latent_values(config)
    if experts is None:
        return {
            **values,
            "architectures": ["MiniCPM3ForCausalLM"],
            "model_type": "minicpm3",
            "scale_emb": config.embedding_multiplier,
            "scale_depth": config.residual_multiplier * math.sqrt(config.num_layers),
            "dim_model_base": config.logit_multiplier * config.hidden_size,
        }
    values |= {
        "n_routed_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "moe_intermediate_size": experts.expert_size,
        "n_shared_experts": experts.shared_size // experts.expert_size,
        "routed_scaling_factor": experts.weight_scale,
        "first_k_dense_replace": experts.layers.index(True) if any(experts.layers) else config.num_layers,
    }
    if experts.sigmoid:
        assert config.latent is not None
        return {
            **values,
            "architectures": ["DeepseekV3ForCausalLM"],
            "model_type": "deepseek_v3",
            "rope_interleave": config.latent.interleaved,
            "norm_topk_prob": experts.normalize,
            "n_group": experts.groups,
            "topk_group": experts.kept_groups,
        }
    grouped = {"topk_method": "group_limited_greedy", "n_group": experts.groups, "topk_group": experts.kept_groups}
    named = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
    return {**values, **named, **(grouped if experts.groups > 1 else {})}


def _latent_values(config: ModelConfig) -> dict[str, Any]:
    """The values of config.json that all models with latents have."""
    rope, latent = config.rope, config.latent
    assert rope is not None and latent is not None, "the family has rotary positions and latents"
    return {
        **decoder_values(config),
        "num_key_value_heads": config.num_heads,
        "head_dim": config.rotary_dim,
        "hidden_act": config.activation,
        "rope_theta": rope.theta,
        "kv_lora_rank": latent.rank,
        "q_lora_rank": latent.q_rank or None,
        "qk_nope_head_dim": config.head_dim - config.rotary_dim,
        "qk_rope_head_dim": config.rotary_dim,
        "v_head_dim": latent.value_dim,
    }


_LACKS = (
    *("qkv_bias", "out_bias", "mlp_bias", "qk_norm", "sliding_windows", "attention_soft_cap", "sliding_rope"),
    *("rotary_layers", "parallel_residual"),
)
_GGUF_EXPERTS = {
    **GGUF_EXPERTS,
    **{f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")},
}
_GGUF_CORRECTION = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}
_SOFTMAX, _SIGMOID = 1, 2
# By their number, the groups of experts, and those that are kept, of DeepSeek V2 and V3: older files have neither.
_GGUF_GROUPS = {160: (8, 3), 256: (8, 4)}


def _gguf_sigmoid(model: GGUFModel) -> bool:
    """Older files, and GLM-4.7-Flash's, do not name the function: a correction goes with a sigmoid."""
    named = model.get("expert_gating_func", 0)
    return named == _SIGMOID or (named == 0 and any(name.endswith(".exp_probs_b.bias") for name in model.names))


def _gguf_config(model: GGUFModel) -> dict[str, Any]:
    fields, count = gguf_latents.config(model), model.need("expert_count", integers(1))
    groups, kept = _GGUF_GROUPS.get(count, (1, 1))
    return fields | {
        "n_routed_experts": count,
        "num_experts_per_tok": model.need("expert_used_count", integers(1)),
        "moe_intermediate_size": model.need("expert_feed_forward_length"),
        "n_shared_experts": model.need("expert_shared_count"),
        "first_k_dense_replace": model.get("leading_dense_block_count", 0),
        "routed_scaling_factor": model.get("expert_weights_scale", 0.0) or 1.0,
        "norm_topk_prob": model.get("expert_weights_norm", False),
        "n_group": model.get("expert_group_count", groups, integers(1)),
        "topk_group": model.get("expert_group_used_count", kept, integers(1)),
    }


def _gguf_v2(model: GGUFModel) -> dict[str, Any]:
    """Groups are chosen by their best expert."""
    model.require("expert_gating_func", _SOFTMAX, 0)
    fields = _gguf_config(model)
    return fields | {"topk_method": "group_limited_greedy" if fields["n_group"] > 1 else "greedy"}


def _gguf_absent(config: Mapping[str, Any]) -> Collection[str]:
    """The tensors of the other kind of MLP, and of the other way to make q."""
    dense, layers = config["first_k_dense_replace"], range(config["num_hidden_layers"])
    others = [gguf_decoder.MLP if layer >= dense else {**_GGUF_EXPERTS, **_GGUF_CORRECTION} for layer in layers]
    return {*gguf_latents.absent(config), *(f"blk.{i}.{name}" for i in layers for name in others[i])}


def _gguf_names(latents: Mapping[str, str]) -> dict[str, str]:
    return {**gguf_latents.Q, **latents, **gguf_decoder.MLP, **_GGUF_EXPERTS}


# GLM-4.7-Flash's files are as those of DeepSeek V3.
_GGUF_V3 = GGUF(
    "deepseek2",
    "model.layers",
    gguf_decoder.NAMES,
    {**_gguf_names(gguf_latents.WHOLE), **_GGUF_CORRECTION},
    _gguf_config,
    absent=_gguf_absent,
    join=gguf_latents.join,
)
_GGUF_V3_SPLIT = replace(
    _GGUF_V3,
    layer_names={**_gguf_names(gguf_latents.SPLIT), **_GGUF_CORRECTION},
    when=lambda model: _gguf_sigmoid(model) and gguf_latents.is_split(model),
)
_GGUF_V2 = replace(
    _GGUF_V3,
    layer_names=_gguf_names(gguf_latents.WHOLE),
    config=_gguf_v2,
    when=lambda model: not (_gguf_sigmoid(model) or gguf_latents.is_split(model)),
)
_GGUF_V2_SPLIT = replace(
    _GGUF_V2,
    layer_names=_gguf_names(gguf_latents.SPLIT),
    when=lambda model: gguf_latents.is_split(model) and not _gguf_sigmoid(model),
)
ARCHITECTURES = {
    "DeepseekV2ForCausalLM": Architecture(
        "deepseek_v2",
        "DeepSeek V2, V2-Lite",
        _parse_v2,
        _V2_DEFAULTS,
        experts=True,
        gguf=(_GGUF_V2, _GGUF_V2_SPLIT),
    ),
    "DeepseekV3ForCausalLM": Architecture(
        "deepseek_v3",
        "DeepSeek V3, R1, Moonlight",
        _parse_v3,
        _V3_DEFAULTS,
        experts=True,
        gguf=(_GGUF_V3, _GGUF_V3_SPLIT),
    ),
    "Glm4MoeLiteForCausalLM": Architecture("glm4_moe_lite", "GLM-4.7-Flash", _parse_glm, _GLM_DEFAULTS, experts=True),
}
FAMILY = Family(
    "deepseek",
    DeepSeek,
    needs={"latent": "the latents of attention"},
    may_have=("experts",),
    lacks=_LACKS,
    hf_values=_hf_values,
)
