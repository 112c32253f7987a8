"""Nemotron-H: a layer is Mamba2, attention without positions, or an MLP with squared ReLU, which may be of experts."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.host.model_files import shown
from rosebatch.model.experts import ExpertNames, load_matrices, make_router
from rosebatch.model.families.bamba import MAMBA_LACKS
from rosebatch.model.families.steps_decoder import Step, StepsDecoder
from rosebatch.model.family import EACH, GGUF, Architecture, Family, GGUFModel, integers, list_of
from rosebatch.model.gguf import decoder as gguf_decoder
from rosebatch.model.gguf import mamba2 as gguf_mamba2
from rosebatch.model.hf.fields import UnservedError, decoder, refuse, size, supported
from rosebatch.model.hf.mamba2 import require_free_steps
from rosebatch.model.mixers.mamba2.sublayer import load_mamba
from rosebatch.model.mixers.paged_attention.sublayer import load_paged_attention
from rosebatch.model.quantization.forms import load_weight
from rosebatch.model.sublayers import load_plain_mlp
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import Choice, Experts, Linear, Ops, Partial, RoutedExperts

_ACTIVATION = "relu2"


@dataclass(frozen=True, slots=True)
class SquaredMLP:
    """``down(relu(up(x)) ** 2)``."""

    ops: Ops
    up: Linear
    down: Linear

    def __call__(self, normed: Tensor) -> Partial:
        """See ``rosebatch.model.sublayers.MLP``."""
        return self.ops.project(self.down, _squared(self.ops, self.up, normed))


@dataclass(frozen=True, slots=True)
class SquaredExpert:
    """The same, whose result the routed experts add to theirs."""

    ops: Ops
    up: Linear
    down: Linear

    def __call__(self, normed: Tensor) -> Tensor:
        """``[T, H] -> [T, H]``."""
        return self.down(_squared(self.ops, self.up, normed))


def _squared(ops: Ops, up: Linear, normed: Tensor) -> Tensor:
    return ops.activated("relu", up, normed).square_()


@dataclass(frozen=True, slots=True)
class Mixture:
    """Experts that logistic scores choose, and an MLP for all tokens whose result is added to theirs.

    Attributes:
        router: of ``[T, H]`` in fp32.
        num_experts: E; the router may have further columns.
    """

    router: Linear
    num_experts: int
    routed: RoutedExperts
    shared: SquaredExpert

    def __call__(self, normed: Tensor) -> Partial:
        """See ``rosebatch.model.sublayers.MLP``."""
        logits = self.router(normed.float())[:, : self.num_experts]
        return self.routed(normed, logits, self.shared(normed))


class NemotronH(StepsDecoder):
    """See ``StepsDecoder``: a layer is a step."""

    embedding_name = "backbone.embeddings"
    norm_name = "backbone.norm_f"

    def load_norm(self, name: str, weights: WeightSource) -> Tensor:
        """In fp32: only the normed result is rounded."""
        return weights.get(f"{name}.weight", (self.config.hidden_size,), dtype=torch.float32, fill=1.0)

    def load_steps(self, weights: WeightSource) -> list[Step]:
        """See ``StepsDecoder``."""
        return [self._load_layer(index, weights) for index in range(self.config.num_layers)]

    def _load_layer(self, index: int, weights: WeightSource) -> Step:
        config, ops, prefix = self.config, self.ops, f"backbone.layers.{index}."
        own = f"{prefix}mixer."
        norm = self.load_norm(f"{prefix}norm", weights)
        if config.state_layers[index]:
            return Step(norm, (load_mamba(config, ops, weights, sum(config.state_layers[:index]), own),))
        if config.attends[index]:
            names, layer = [f"{own}{name}_proj" for name in "qkv"], sum(config.attends[:index])
            attention = load_paged_attention(
                config, ops, weights, layer, names, f"{own}o_proj", rotary=None, qk_norm=None, qkv_order=None
            )
            return Step(norm, (attention,))
        routes = config.experts is not None and config.experts.layers[index]
        size = config.intermediate_size
        return Step(
            norm, mlp=self._load_mixture(own, weights) if routes else SquaredMLP(*self._load_mlp(own, size, weights))
        )

    def _load_mlp(self, prefix: str, size: int, weights: WeightSource) -> tuple[Ops, Linear, Linear]:
        config = msgspec.structs.replace(self.config, intermediate_size=size)
        plain = load_plain_mlp(config, self.ops, weights, f"{prefix}up_proj", f"{prefix}down_proj")
        return self.ops, plain.up, plain.down

    def _load_mixture(self, prefix: str, weights: WeightSource) -> Mixture:
        config, experts, ops, fp32 = self.config, self.config.experts, self.ops, torch.float32
        assert experts is not None, "the layer has experts"
        count, hidden, size = experts.num_experts, config.hidden_size, experts.expert_size
        names = ExpertNames(expert="experts")
        up = load_matrices(weights, prefix, names, ("up_proj",), "up_proj", config, (size, hidden))
        down = load_matrices(weights, prefix, names, ("down_proj",), "down_proj", config, (hidden, size))
        inner = ops.shard.of(size)
        bias = weights.get(f"{prefix}gate.e_score_correction_bias", (count,), dtype=fp32, fill=0.0)
        routed = Experts(
            gate_up=up.rows(inner),
            down=down.columns(inner),
            activation=_ACTIVATION,
            k=experts.experts_per_token,
            normalize=experts.normalize,
            choice=Choice(sigmoid=True, bias=bias, scale=experts.weight_scale),
        )
        router = load_weight(weights, f"{prefix}gate.weight", (count, hidden), dtype=fp32)
        shared = SquaredExpert(*self._load_mlp(f"{prefix}shared_experts.", experts.shared_size, weights))
        return Mixture(make_router(ops, router), count, ops.experts(routed), shared)


# Defaults of transformers' config class.
_DEFAULTS = {
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 21504,
    "max_position_embeddings": 4096,
    "layer_norm_epsilon": 1e-5,
    "mlp_hidden_act": _ACTIVATION,
    "mamba_hidden_act": "silu",
    "pad_token_id": 0,
    "eos_token_id": 2,
    "ssm_state_size": 128,
    "mamba_num_heads": 128,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "conv_kernel": 4,
    "use_conv_bias": True,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 7688,
    "moe_shared_expert_intermediate_size": 7688,
}
# Letters of a pattern, and names of versions of transformers.
_KINDS = {
    **dict.fromkeys(("M", "mamba", "linear_attention"), "mamba"),
    **dict.fromkeys(("*", "attention", "full_attention"), "attention"),
    **dict.fromkeys(("-", "mlp"), "mlp"),
    **dict.fromkeys(("E", "moe"), "moe"),
}


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    refuse(values, "sliding_window")
    # The convolutions of transformers' layers have it; ours have SiLU.
    supported("mamba_hidden_act", values["mamba_hidden_act"], ("silu",))
    require_free_steps(values)
    kinds = _layer_kinds(values)
    fields = decoder(
        {**values, "num_hidden_layers": len(kinds)},
        "nemotron_h",
        eps="layer_norm_epsilon",
        activation="mlp_hidden_act",
        activations=(_ACTIVATION,),
    )
    return fields | {
        "mlp_bias": values.get("mlp_bias", False),
        "attention_layers": [kind == "attention" for kind in kinds],
        "mlp_layers": [kind in ("mlp", "moe") for kind in kinds],
        "experts": _experts(values, kinds) if "moe" in kinds else None,
        "mamba": {
            "layers": [kind == "mamba" for kind in kinds],
            "heads": size(values, "mamba_num_heads"),
            "head_dim": size(values, "mamba_head_dim"),
            "groups": size(values, "n_groups"),
            "state_size": size(values, "ssm_state_size"),
            "taps": size(values, "conv_kernel"),
            "conv_bias": values["use_conv_bias"],
            "proj_bias": values.get("use_bias", False),
        },
    }


def _experts(values: Mapping[str, Any], kinds: list[str]) -> dict[str, Any]:
    refuse(values, "moe_latent_size", "mlp_bias")
    if values.get("n_group", 1) != 1:
        raise UnservedError(f"n_group {shown(values['n_group'])} is not supported: experts are one group")
    return {
        "layers": [kind == "moe" for kind in kinds],
        "num_experts": size(values, "n_routed_experts"),
        "experts_per_token": size(values, "num_experts_per_tok"),
        "expert_size": size(values, "moe_intermediate_size"),
        "normalize": values.get("norm_topk_prob", True),
        "shared_size": size(values, "moe_shared_expert_intermediate_size"),
        "sigmoid": True,
        "weight_scale": values.get("routed_scaling_factor", 1.0),
    }


def _layer_kinds(values: Mapping[str, Any]) -> list[str]:
    """``mamba``, ``attention``, ``mlp`` or ``moe`` for each layer."""
    given = values.get("layers_block_type") or values.get("layer_types") or values.get("hybrid_override_pattern")
    if not isinstance(given, list | str):
        raise ValueError(f"layers_block_type must be a list of the layers' types, got {shown(given)}")
    return [_KINDS[supported("layers_block_type", kind, _KINDS)] for kind in given]


def _check(config: ModelConfig) -> None:
    each = zip(config.state_layers, config.attends, config.mlp_layers or (), strict=True)
    if any(sum(layer) != 1 for layer in each):
        raise ValueError("a layer of nemotron_h has Mamba2, attention or an MLP: one of the three")


def _hf_values(config: ModelConfig) -> dict[str, Any]:
    part = config.mamba
    assert part is not None, "the family has Mamba2"
    experts = config.experts
    routed = experts.layers if experts else (False,) * config.num_layers
    each = zip(config.state_layers, config.attends, routed, strict=True)
    kinds = [
        "linear_attention" if state else "full_attention" if attends else "moe" if routes else "mlp"
        for state, attends, routes in each
    ]
    of_experts = (
        {}
        if experts is None
        else {
            "n_routed_experts": experts.num_experts,
            "num_experts_per_tok": experts.experts_per_token,
            "moe_intermediate_size": experts.expert_size,
            "moe_shared_expert_intermediate_size": experts.shared_size,
            "norm_topk_prob": experts.normalize,
            "routed_scaling_factor": experts.weight_scale,
        }
    )
    return {
        **of_experts,
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hidden_size": config.hidden_size,
        "layers_block_type": kinds,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_model_len,
        "layer_norm_epsilon": config.norm_eps,
        "mamba_num_heads": part.heads,
        "mamba_head_dim": part.head_dim,
        "n_groups": part.groups,
        "ssm_state_size": part.state_size,
        "conv_kernel": part.taps,
        "use_conv_bias": part.conv_bias,
        "use_bias": part.proj_bias,
    }


# GGUF's names by kind of layer.
_GGUF_LAYERS = {
    "linear_attention": gguf_mamba2.names("mixer."),
    "full_attention": {name: other.replace("self_attn", "mixer") for name, other in gguf_decoder.ATTENTION.items()},
    "mlp": {"ffn_up": "mixer.up_proj", "ffn_down": "mixer.down_proj"},
    "moe": {
        "ffn_gate_inp": "mixer.gate",
        "exp_probs_b.bias": "mixer.gate.e_score_correction_bias",
        "ffn_up_exps": f"mixer.experts.{EACH}.up_proj",
        "ffn_down_exps": f"mixer.experts.{EACH}.down_proj",
        "ffn_up_shexp": "mixer.shared_experts.up_proj",
        "ffn_down_shexp": "mixer.shared_experts.down_proj",
    },
}


def _gguf_config(model: GGUFModel, mlp: str = "mlp") -> dict[str, Any]:
    """Two lists say which layers have attention and an MLP: the others have Mamba2."""
    layers, eps = model.without_drafts(), model.need("attention.layer_norm_rms_epsilon", float)
    attends, kv_heads = gguf_decoder.attending(model, layers)
    inner = model.need("feed_forward_length", list_of(integers(), model.need("block_count")))[:layers]
    model.require("attention.layer_norm_epsilon", eps)
    head_dim = model.need("attention.key_length", integers(1))
    model.require("attention.value_length", head_dim)
    # Of positions, which these models do not have.
    for name in ("dimension_count", "freq_base"):
        model.get(f"rope.{name}")
    model.require("rope.scaling.finetuned", False)
    own = gguf_mamba2.config(model)
    kinds = zip(attends, inner, strict=True)
    return {
        "hidden_size": model.need("embedding_length"),
        "intermediate_size": max(inner) or 1,
        "layers_block_type": [
            "full_attention" if attend else mlp if size else "linear_attention" for attend, size in kinds
        ],
        "num_hidden_layers": layers,
        "num_attention_heads": model.need("attention.head_count", integers(1)),
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": model.need("context_length"),
        "layer_norm_epsilon": eps,
        "mlp_bias": gguf_mamba2.has(model, "ffn_up.bias"),
        "mamba_num_heads": own["mamba_n_heads"],
        "mamba_head_dim": own["mamba_d_head"],
        "n_groups": own["mamba_n_groups"],
        "ssm_state_size": own["mamba_d_state"],
        "conv_kernel": own["mamba_d_conv"],
        "use_conv_bias": own["mamba_conv_bias"],
        "use_bias": own["mamba_proj_bias"],
    }


def _gguf_mixture(model: GGUFModel) -> dict[str, Any]:
    """A sigmoid chooses experts of one group."""
    for name in ("group_count", "group_used_count", "shared_count"):
        model.require(f"expert_{name}", 1)
    model.require("expert_gating_func", 2)
    return {
        **_gguf_config(model, "moe"),
        "n_routed_experts": model.need("expert_count", integers(1)),
        "num_experts_per_tok": model.need("expert_used_count", integers(1)),
        "moe_intermediate_size": model.need("expert_feed_forward_length"),
        "moe_shared_expert_intermediate_size": model.need("expert_shared_feed_forward_length"),
        "norm_topk_prob": model.get("expert_weights_norm", False),
        "routed_scaling_factor": model.get("expert_weights_scale", 0.0) or 1.0,
    }


def _gguf_absent(config: Mapping[str, Any]) -> Collection[str]:
    """The tensors of the other kinds of layers."""
    return {
        f"blk.{layer}.{name}"
        for layer, kind in enumerate(config["layers_block_type"])
        for other, names in _GGUF_LAYERS.items()
        if other != kind
        for name in names
    }


def _gguf_biases(config: Mapping[str, Any]) -> Collection[str]:
    mamba = {"mamba_conv_bias": config["use_conv_bias"], "mamba_proj_bias": config["use_bias"]}
    return (*gguf_mamba2.biases(mamba), *(_GGUF_LAYERS["mlp"] if config["mlp_bias"] else ()))


def _gguf_names(*kinds: str) -> dict[str, str]:
    return {"attn_norm": "norm", **{name: other for kind in kinds for name, other in _GGUF_LAYERS[kind].items()}}


def _gguf_values(name: str, values: NDArray[np.float32], _: Mapping[str, Any]) -> NDArray[np.float32]:
    return gguf_mamba2.values(name, values)


_GGUF = GGUF(
    "nemotron_h",
    "backbone.layers",
    {"token_embd": "backbone.embeddings", "output_norm": "backbone.norm_f", "output": "lm_head"},
    _gguf_names(*_GGUF_LAYERS.keys() - {"moe"}),
    _gguf_config,
    biases=_gguf_biases,
    absent=_gguf_absent,
    bare=gguf_mamba2.BARE,
    values=_gguf_values,
)
_GGUF_MOE = replace(_GGUF, architecture="nemotron_h_moe", layer_names=_gguf_names(*_GGUF_LAYERS), config=_gguf_mixture)
ARCHITECTURES = {
    "NemotronHForCausalLM": Architecture(
        "nemotron_h",
        "Nemotron-H, Nemotron 3",
        _parse,
        _DEFAULTS,
        experts=True,
        fallback=False,
        gguf=(_GGUF, _GGUF_MOE),
    ),
}
FAMILY = Family(
    "nemotron_h",
    NemotronH,
    activations=(_ACTIVATION,),
    mlp_matrices=2,
    needs={
        "mamba": "Mamba2",
        "attention_layers": "which layers have attention",
        "mlp_layers": "which layers have an MLP",
    },
    may_have=("experts",),
    lacks=("rope", *MAMBA_LACKS),
    check=_check,
    hf_values=_hf_values,
)
