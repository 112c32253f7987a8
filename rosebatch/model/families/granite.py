"""Granite 3.x and 4: a Llama with multipliers in four places. Granite 4 may have Mamba2 layers and experts."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rosebatch.config.model import ModelConfig
from rosebatch.model.experts import ExpertsMLP, SharedExpert, make_router
from rosebatch.model.families.bamba import MambaLlama, mamba_values
from rosebatch.model.families.llama import LLAMA_DEFAULTS, LLAMA_GGUF, parse_llama
from rosebatch.model.family import Architecture, Family, GGUFModel
from rosebatch.model.gguf import decoder as gguf_decoder
from rosebatch.model.hf.fields import decoder_values, local_experts, size, supported
from rosebatch.model.hf.mamba2 import MAMBA_DEFAULTS, mamba, mamba_layers
from rosebatch.model.quantization.forms import load_matrix, load_weight
from rosebatch.model.sublayers import MLP, GatedMLP, columns, load_gated_mlp
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import EXPERT_GATES, GATES, Experts


class Granite4(MambaLlama):
    """See ``MambaLlama``: an MLP for all tokens, alone or beside experts, with gate and up as one tensor."""

    def load_mlp(self, index: int, prefix: str, weights: WeightSource) -> MLP:
        """See ``Llama``."""
        names, down = [f"{prefix}shared_mlp.input_linear"], f"{prefix}shared_mlp.output_linear"
        shared = load_gated_mlp(self.config, self.ops, weights, names, down)
        return shared if self.config.experts is None else self._load_mixture(prefix, weights, shared)

    def _load_mixture(self, prefix: str, weights: WeightSource, shared: GatedMLP) -> MLP:
        config, experts, own = self.config, self.config.experts, f"{prefix}block_sparse_moe."
        assert experts is not None, "the layer has experts"
        number, hidden, size = experts.num_experts, config.hidden_size, experts.expert_size
        inner = self.ops.shard.of(size)
        gate_up = load_matrix(weights, f"{own}input_linear.weight", (number, 2 * size, hidden))
        down = load_matrix(weights, f"{own}output_linear.weight", (number, hidden, size))
        routed = Experts(
            gate_up=gate_up.rows(columns((size, inner), (size, inner))),
            down=down.columns(inner),
            activation=EXPERT_GATES[config.activation],
            k=experts.experts_per_token,
            normalize=experts.normalize,
        )
        return ExpertsMLP(
            router=make_router(self.ops, load_weight(weights, f"{own}router.layer.weight", (number, hidden))),
            num_experts=number,
            routed=self.ops.experts(routed),
            shared=SharedExpert(self.ops, GATES[config.activation], shared.gate_up, shared.down),
        )


# Default of transformers' config class.
_GRANITE_4_DEFAULTS = {
    **LLAMA_DEFAULTS,
    **MAMBA_DEFAULTS,
    "intermediate_size": 11008,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "shared_intermediate_size": 1024,
}


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    fields = parse_llama(values)
    return fields | {
        "attention_scales": [values.get("attention_multiplier", 1.0)] * fields["num_layers"],
        "embedding_multiplier": values.get("embedding_multiplier", 1.0),
        "residual_multiplier": values.get("residual_multiplier", 1.0),
        "logit_multiplier": 1 / values.get("logits_scaling", 1.0),
    }


def _parse_granite_4(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; rotary positions or none."""
    number, shared = size(values, "num_hidden_layers"), size(values, "shared_intermediate_size")
    layers = mamba_layers(values.get("layer_types") or values.get("layers_block_type") or ["mamba"] * number)
    fields = _parse({**values, "intermediate_size": shared, "mlp_bias": False})
    fields |= {"family": "granite4", "rotary_layers": [values.get("position_embedding_type") == "rope"] * number}
    if any(layers):
        # The convolutions of transformers' layers have it too; ours have SiLU.
        supported("hidden_act", values["hidden_act"], ("silu",))
        fields["mamba"] = mamba(values, layers)
    if values["num_local_experts"]:
        supported("hidden_act", values["hidden_act"], EXPERT_GATES)
        fields["experts"] = local_experts(values, number) | {"shared_size": shared}
    return fields


def _check(config: ModelConfig) -> None:
    # Layers are counted apart by what they have: no option goes by their number.
    if config.mamba and (len({*config.attention_scales}) > 1 or any(config.sliding_windows)):
        raise ValueError("with Mamba2, attention is alike in all layers that have it")


def _hf_values(config: ModelConfig) -> dict[str, Any]:
    rope, experts = config.rope, config.experts
    assert rope is not None, "Granite has a base of rotary positions"
    counts = {"num_local_experts": 0, "shared_intermediate_size": config.intermediate_size}
    if experts is not None:
        counts |= {
            "num_local_experts": experts.num_experts,
            "num_experts_per_tok": experts.experts_per_token,
            "intermediate_size": experts.expert_size,
        }
    return {
        **decoder_values(config),
        **(mamba_values(config) if config.mamba else {}),
        **counts,
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_act": config.activation,
        "layer_types": ["linear_attention" if state else "full_attention" for state in config.state_layers],
        "position_embedding_type": "rope" if config.layer_rope(0) else None,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.theta},
        "attention_multiplier": config.attention_scale(0),
        "embedding_multiplier": config.embedding_multiplier,
        "residual_multiplier": config.residual_multiplier,
        "logits_scaling": 1 / config.logit_multiplier,
    }


def _gguf_config(model: GGUFModel) -> dict[str, Any]:
    """A factor of 0 is none."""
    # By this key, the files say whether there are rotary positions at all.
    model.require("rope.scaling.finetuned", True)
    fields = gguf_decoder.decoder(model)
    return fields | {
        "attention_multiplier": model.get("attention.scale", 0.0) or fields["head_dim"] ** -0.5,
        "embedding_multiplier": model.get("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": model.get("residual_scale", 0.0) or 1.0,
        "logits_scaling": model.need("logit_scale", float),
        "attention_bias": gguf_decoder.has(model, "attn_q.bias"),
        "mlp_bias": gguf_decoder.has(model, "ffn_gate.bias"),
    }


_GGUF = replace(LLAMA_GGUF, architecture="granite", config=_gguf_config)
ARCHITECTURES = {
    "GraniteForCausalLM": Architecture("granite", "Granite 3.x", _parse, LLAMA_DEFAULTS, gguf=(_GGUF,)),
    "GraniteMoeHybridForCausalLM": Architecture(
        "granitemoehybrid", "Granite 4", _parse_granite_4, _GRANITE_4_DEFAULTS, experts=True, fallback=False
    ),
}
FAMILY = Family("granite4", Granite4, may_have=("mamba", "experts"), check=_check, hf_values=_hf_values)
