"""Kimi Linear: the delta rule with decays of channels in most layers, latent attention without positions in others."""

from collections.abc import Mapping
from typing import Any

from rosebatch.host.model_files import shown
from rosebatch.model.experts import ExpertNames
from rosebatch.model.families.deepseek import MLP_TYPES, behind_dense, corrected_experts, latents
from rosebatch.model.families.llama import Llama
from rosebatch.model.families.qwen3_next import DELTA_LACKS
from rosebatch.model.family import Architecture, Family
from rosebatch.model.hf.fields import UnservedError, size, supported
from rosebatch.model.mixers.gated_delta.low_rank import load_low_rank_delta
from rosebatch.model.mixers.latent_attention.sublayer import load_latent_attention
from rosebatch.model.rope import Rotary
from rosebatch.model.sublayers import MLP, Mixer, load_gated_mlp
from rosebatch.model.weights import WeightSource

_EXPERTS = "block_sparse_moe"


class KimiLinear(Llama):
    """See ``Llama``."""

    expert_names = ExpertNames(
        f"{_EXPERTS}.gate", f"{_EXPERTS}.experts", *("w1", "w3", "w2"), shared=f"{_EXPERTS}.shared_experts"
    )

    def load_mixer(self, index: int, prefix: str, rotary: Rotary | None, weights: WeightSource) -> Mixer:
        """See ``Llama``."""
        layers = self.config.state_layers
        before, own = sum(layers[:index]), f"{prefix}self_attn."
        if layers[index]:
            return load_low_rank_delta(self.config, self.ops, weights, before, own)
        return load_latent_attention(self.config, self.ops, weights, index - before, own, rotary)

    def load_mlp(self, index: int, prefix: str, weights: WeightSource) -> MLP:
        """See ``Llama``. transformers gives dense layers the name of experts when it saves them."""
        experts = self.config.experts
        stored = f"{prefix}{_EXPERTS}."
        if (experts and experts.layers[index]) or weights.shape(f"{stored}down_proj.weight") is None:
            return super().load_mlp(index, prefix, weights)
        names = [f"{stored}{name}_proj" for name in ("gate", "up")]
        return load_gated_mlp(self.config, self.ops, weights, names, f"{stored}down_proj")


# Defaults of transformers' config class, by the names in files.
_DEFAULTS = {
    "intermediate_size": 9216,
    "model_max_length": 1048576,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "pad_token_id": 163839,
    "eos_token_id": 163586,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 1024,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_shared_experts": 1,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_renormalize": True,
    "routed_scaling_factor": 2.446,
    "first_k_dense_replace": 1,
    "linear_head_dim": 128,
    "linear_num_heads": 32,
    "linear_conv_kernel_dim": 4,
}
# DeepSeek's names of fields -> those in files; transformers takes both, but for the number of experts.
_NAMES = {
    "max_position_embeddings": "model_max_length",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
    "norm_topk_prob": "moe_renormalize",
}
# The same of the object for the rule's layers.
_RULE = {"linear_head_dim": "head_dim", "linear_num_heads": "num_heads"}
_RULE |= {"linear_conv_kernel_dim": "short_conv_kernel_size"}
_LAYER_TYPES = ("linear_attention", "full_attention")


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    supported("moe_router_activation_func", values.get("moe_router_activation_func", "sigmoid"), ("sigmoid",))
    if not values.get("mla_use_nope", True):
        raise UnservedError("mla_use_nope false is not supported")
    rule = values.get("linear_attn_config") or {}
    if not isinstance(rule, dict):
        raise ValueError(f"linear_attn_config is no object: {shown(rule)}")
    values = {
        **values,
        **{ours: values.get(ours, values[theirs]) for ours, theirs in _NAMES.items()},
        "n_routed_experts": values.get("num_local_experts", values["num_experts"]),
        **{ours: rule.get(theirs, values[ours]) for ours, theirs in _RULE.items()},
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    # The convolutions of transformers' layers have it too; ours have SiLU.
    supported("hidden_act", values["hidden_act"], ("silu",))
    fields = latents(values, "kimi_linear", interleaved=False)
    count = fields["num_layers"]
    kinds = values.get("mlp_layer_types")
    routed = behind_dense(values, count)
    if kinds:
        routed = [supported("mlp_layer_types", kind, MLP_TYPES) == "sparse" for kind in kinds]
    heads, head_dim = size(values, "linear_num_heads"), size(values, "linear_head_dim")
    return fields | {
        "rotary_layers": [False] * count,
        "experts": corrected_experts(values, routed),
        "delta": {
            "layers": [kind == "linear_attention" for kind in _layer_types(values, rule, count)],
            **dict.fromkeys(("key_heads", "value_heads"), heads),
            **dict.fromkeys(("key_dim", "value_dim"), head_dim),
            "taps": size(values, "linear_conv_kernel_dim"),
            "by_channel": True,
        },
    }


def _layer_types(values: Mapping[str, Any], rule: Mapping[str, Any], count: int) -> list[str]:
    if given := values.get("layer_types"):
        return [supported("layer_types", kind, _LAYER_TYPES) for kind in given]
    if "full_attn_layers" in rule and "kda_layers" in rule:
        # Counted from 1.
        attends, others = set(rule["full_attn_layers"]), set(rule["kda_layers"])
        if attends | others != set(range(1, count + 1)) or attends & others:
            raise ValueError(f"full_attn_layers and kda_layers are not layers 1 to {count}, each once")
        return ["full_attention" if layer + 1 in attends else "linear_attention" for layer in range(count)]
    return ["full_attention" if layer and layer % 4 == 0 else "linear_attention" for layer in range(count)]


ARCHITECTURES = {
    "KimiLinearForCausalLM": Architecture(
        "kimi_linear", "Kimi Linear", _parse, _DEFAULTS, experts=True, fallback=False
    ),
}
FAMILY = Family(
    "kimi_linear",
    KimiLinear,
    needs={"delta": "the delta rule", "latent": "the latents of attention"},
    may_have=("experts",),
    lacks=(*DELTA_LACKS, "qkv_bias", "out_bias", "mlp_bias", "qk_norm"),
)
