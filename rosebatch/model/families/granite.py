"""Granite 3.x and 4: a Llama with multipliers in four places. Granite 4 may have Mamba2 layers and experts."""

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rosebatch.config.model import ModelConfig
from rosebatch.model.experts import ExpertsMLP, SharedExpert, make_router
from rosebatch.model.families.bamba import MambaLlama, gguf_biases, gguf_values, mamba_values
from rosebatch.model.families.llama import LLAMA_DEFAULTS, LLAMA_GGUF, parse_llama
from rosebatch.model.family import GGUF, Architecture, Family, GGUFModel
from rosebatch.model.gguf import decoder as gguf_decoder
from rosebatch.model.gguf import mamba2 as gguf_mamba2
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
    """By one key, the files say whether there are rotary positions at all."""
    model.require("rope.scaling.finetuned", True)
    fields = gguf_decoder.decoder(model)
    return fields | _gguf_factors(model, fields["head_dim"]) | {"mlp_bias": gguf_decoder.has(model, "ffn_gate.bias")}


def _gguf_factors(model: GGUFModel, head_dim: int) -> dict[str, Any]:
    """A factor of 0 is none."""
    return {
        "attention_multiplier": model.get("attention.scale", 0.0) or head_dim**-0.5,
        "embedding_multiplier": model.get("embedding_scale", 0.0) or 1.0,
        "residual_multiplier": model.get("residual_scale", 0.0) or 1.0,
        "logits_scaling": model.need("logit_scale", float),
        "attention_bias": gguf_mamba2.has(model, "attn_q.bias"),
    }


def _gguf_granite_4(model: GGUFModel) -> dict[str, Any]:
    """Files of models without positions have 2^20 as their length."""
    attends, kv_heads = gguf_decoder.attending(model, model.need("block_count"))
    fields, inner = gguf_decoder.decoder(model, kv_heads=kv_heads), model.need("feed_forward_length")
    return {
        **fields,
        **_gguf_factors(model, fields["head_dim"]),
        **gguf_mamba2.config(model),
        "layer_types": ["full_attention" if own else "linear_attention" for own in attends],
        "position_embedding_type": "rope" if model.get("rope.scaling.finetuned", True) else None,
        "num_local_experts": model.get("expert_count", 0),
        "num_experts_per_tok": model.get("expert_used_count", 0),
        "shared_intermediate_size": model.get("expert_shared_feed_forward_length", 0) or inner,
    }


def _gguf_absent(config: Mapping[str, Any]) -> Collection[str]:
    """The tensors of the other kind of layer, and of the other kind of MLP."""
    kinds = enumerate(config["layer_types"])
    others = (gguf_decoder.ATTENTION if kind == "linear_attention" else _GGUF_MAMBA for _, kind in kinds)
    mixers = {f"blk.{i}.{name}" for i, names in enumerate(others) for name in names}
    return {*mixers, *(_GGUF_SHARED if config["num_local_experts"] else _GGUF_MIXTURE)}


_GGUF = replace(LLAMA_GGUF, architecture="granite", config=_gguf_config)
_GGUF_MAMBA = gguf_mamba2.names("mamba.")
# Gate and up are one matrix, that of all tokens and those of experts.
_GGUF_SHARED = {
    "ffn_gate": "shared_mlp.input_linear",
    "ffn_up": "shared_mlp.input_linear",
    "ffn_down": "shared_mlp.output_linear",
}
_GGUF_MIXTURE = {
    **{f"{name}_shexp": other for name, other in _GGUF_SHARED.items()},
    "ffn_gate_inp": "block_sparse_moe.router.layer",
    "ffn_gate_exps": "block_sparse_moe.input_linear",
    "ffn_up_exps": "block_sparse_moe.input_linear",
    "ffn_down_exps": "block_sparse_moe.output_linear",
}
_GGUF_GRANITE_4 = GGUF(
    "granitehybrid",
    "model.layers",
    gguf_decoder.NAMES,
    {**gguf_decoder.ATTENTION, **_GGUF_MAMBA, **_GGUF_SHARED, **_GGUF_MIXTURE, **gguf_decoder.NORMS},
    _gguf_granite_4,
    biases=gguf_biases,
    absent=_gguf_absent,
    bare=gguf_mamba2.BARE,
    values=gguf_values,
    join=partial(torch.cat, dim=-2),
)
ARCHITECTURES = {
    "GraniteForCausalLM": Architecture("granite", "Granite 3.x", _parse, LLAMA_DEFAULTS, gguf=(_GGUF,)),
    "GraniteMoeHybridForCausalLM": Architecture(
        "granitemoehybrid",
        "Granite 4",
        _parse_granite_4,
        _GRANITE_4_DEFAULTS,
        experts=True,
        fallback=False,
        gguf=(_GGUF_GRANITE_4,),
    ),
}
FAMILY = Family("granite4", Granite4, may_have=("mamba", "experts"), check=_check, hf_values=_hf_values)
