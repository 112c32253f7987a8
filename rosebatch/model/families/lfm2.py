"""LFM2: short convolutions in most layers, attention in the others, and perhaps experts."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rosebatch.config.model import ModelConfig
from rosebatch.host.model_files import shown
from rosebatch.model.experts import ExpertNames
from rosebatch.model.families.llama import Llama
from rosebatch.model.family import GGUF, Architecture, Family, GGUFModel, integers
from rosebatch.model.gguf import decoder as gguf_decoder
from rosebatch.model.hf.fields import UnservedError, decoder, decoder_values, refuse, size, supported
from rosebatch.model.hf.rope import whole_rope
from rosebatch.model.mixers.short_conv.sublayer import load_short_conv
from rosebatch.model.rope import Rotary
from rosebatch.model.sublayers import Mixer
from rosebatch.model.weights import WeightSource

_LAYER_TYPES = ("conv", "full_attention")


class LFM2(Llama):
    """See ``Llama``."""

    out_name = "self_attn.out_proj"
    qk_norm_names = ("self_attn.q_layernorm", "self_attn.k_layernorm")
    gate_up_names = ("feed_forward.w1", "feed_forward.w3")
    down_name = "feed_forward.w2"
    expert_names = ExpertNames(
        "feed_forward.gate",
        "feed_forward.experts",
        *("w1", "w3", "w2"),
        bias="expert_bias",
        whole=True,
    )
    input_norm_name = "operator_norm"
    mlp_norm_name = "ffn_norm"
    norm_name = "model.embedding_norm"

    def load_mixer(self, index: int, prefix: str, rotary: Rotary | None, weights: WeightSource) -> Mixer:
        """See ``Llama``."""
        conv = self.config.conv
        assert conv is not None, "the family has short convolutions"
        before = sum(conv.layers[:index])
        if conv.layers[index]:
            return load_short_conv(self.config, self.ops, weights, before, f"{prefix}conv.")
        return super().load_mixer(index - before, prefix, rotary, weights)


# Defaults of transformers' config classes. They have no field for the activation, which is SiLU.
_SHARED_DEFAULTS = {
    "num_key_value_heads": 8,
    "max_position_embeddings": 128_000,
    "norm_eps": 1e-5,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
}
_DEFAULTS = {
    **_SHARED_DEFAULTS,
    "intermediate_size": 12288,
    "block_multiple_of": 256,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": True,
}
_MOE_DEFAULTS = {
    **_SHARED_DEFAULTS,
    "intermediate_size": 7168,
    "moe_intermediate_size": 1792,
    "num_dense_layers": 2,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "use_expert_bias": True,
    "routed_scaling_factor": 1.0,
    "norm_topk_prob": True,
}
# What transformers adds to the sum of the chosen experts' weights.
_SUM_EPS = 1e-6
_THETA = 1_000_000.0


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    # A name of its first checkpoints.
    values = {**values, "intermediate_size": values.get("block_ff_dim", values["intermediate_size"])}
    return _parse_layers({**values, "intermediate_size": _inner_size(values)})


def _parse_experts(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    if not values["use_expert_bias"]:
        raise UnservedError("use_expert_bias false is not supported")
    fields, dense = _parse_layers(values), values["num_dense_layers"]
    if type(dense) is not int or dense < 0:
        raise ValueError(f"num_dense_layers must be a whole number >= 0, got {shown(dense)}")
    return fields | {
        "experts": {
            "layers": [layer >= dense for layer in range(fields["num_layers"])],
            "num_experts": size(values, "num_experts"),
            "experts_per_token": size(values, "num_experts_per_tok"),
            "expert_size": size(values, "moe_intermediate_size"),
            "normalize": values["norm_topk_prob"],
            "sigmoid": True,
            "weight_scale": values["routed_scaling_factor"],
            "sum_eps": _SUM_EPS,
        }
    }


def _parse_layers(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig`` without experts."""
    refuse(values, "conv_bias")
    tied = values.get("tie_embedding", values["tie_word_embeddings"])
    values = {"rope_theta": _THETA, **values, "tie_word_embeddings": tied}
    fields = decoder(values, "lfm2", eps="norm_eps")
    kinds = _layer_types(values, fields["num_layers"])
    return fields | {
        "qk_norm": True,
        "rope": whole_rope(values),
        "conv": {"layers": [kind == "conv" for kind in kinds], "taps": size(values, "conv_L_cache")},
    }


def _inner_size(values: Mapping[str, Any]) -> int:
    """Channels of the MLP, which most configs give three half times as large."""
    inner = size(values, "intermediate_size")
    if not values["block_auto_adjust_ff_dim"]:
        return inner
    inner = 2 * inner // 3
    factor, unit = values["block_ffn_dim_multiplier"], size(values, "block_multiple_of")
    if factor is None:
        return inner
    if not isinstance(factor, int | float) or not 0 < factor < 1e6:
        raise ValueError(f"block_ffn_dim_multiplier must be a number > 0, got {shown(factor)}")
    return -(-int(factor * inner) // unit) * unit


def _layer_types(values: Mapping[str, Any], layers: int) -> list[str]:
    if given := values.get("layer_types"):
        return [supported("layer_types", kind, _LAYER_TYPES) for kind in given]
    attends = values.get("full_attn_idxs")
    if attends is None:
        attends = range(layers)
    elif not isinstance(attends, list) or any(type(each) is not int for each in attends):
        raise ValueError(f"full_attn_idxs must be a list of whole numbers, got {shown(attends)}")
    return ["full_attention" if layer in attends else "conv" for layer in range(layers)]


def _hf_values(config: ModelConfig) -> dict[str, Any]:
    rope, conv = config.rope, config.conv
    assert rope is not None and conv is not None, "LFM2 has rotary positions and convolutions"
    values = decoder_values(config)
    del values["rms_norm_eps"]
    values |= {
        "norm_eps": config.norm_eps,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.theta},
        "layer_types": ["conv" if short else "full_attention" for short in conv.layers],
        "conv_L_cache": conv.taps,
    }
    experts = config.experts
    if experts is None:
        named = {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2"}
        return {**values, **named, "block_auto_adjust_ff_dim": False}
    return {
        **values,
        "architectures": ["Lfm2MoeForCausalLM"],
        "model_type": "lfm2_moe",
        "num_dense_layers": experts.layers.index(True) if any(experts.layers) else config.num_layers,
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "moe_intermediate_size": experts.expert_size,
        "norm_topk_prob": experts.normalize,
        "routed_scaling_factor": experts.weight_scale,
    }


_GGUF_ATTENTION = {
    **{name: f"self_attn.{name[-1]}_proj" for name in gguf_decoder.QKV},
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
}
_GGUF_CONV = {
    "shortconv.conv.weight": "conv.conv.weight",
    "shortconv.in_proj.weight": "conv.in_proj.weight",
    "shortconv.out_proj.weight": "conv.out_proj.weight",
}
_GGUF_OTHERS = {
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
}


def _gguf_config(model: GGUFModel) -> dict[str, Any]:
    """Files have the size of MLPs as it is."""
    attends, kv_heads = gguf_decoder.attending(model, model.need("block_count"))
    fields = gguf_decoder.decoder(model, kv_heads=kv_heads)
    return fields | {
        "norm_eps": fields.pop("rms_norm_eps"),
        "layer_types": ["full_attention" if own else "conv" for own in attends],
        "conv_L_cache": model.need("shortconv.l_cache", integers(1)),
        "block_auto_adjust_ff_dim": False,
    }


def _gguf_absent(config: Mapping[str, Any]) -> Collection[str]:
    """The tensors of the other kind of layer."""
    kinds = enumerate(config["layer_types"])
    return {f"blk.{i}.{name}" for i, kind in kinds for name in (_GGUF_ATTENTION if kind == "conv" else _GGUF_CONV)}


def _gguf_values(name: str, values: NDArray[np.float32], _: Mapping[str, Any]) -> NDArray[np.float32]:
    """Files have the convolution without its middle."""
    return values[:, None] if name.endswith("conv.conv.weight") else values


_GGUF = GGUF(
    "lfm2",
    "model.layers",
    {"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"},
    {**_GGUF_ATTENTION, **_GGUF_CONV, **_GGUF_OTHERS},
    _gguf_config,
    absent=_gguf_absent,
    values=_gguf_values,
)
ARCHITECTURES = {
    "Lfm2ForCausalLM": Architecture("lfm2", "LFM2, LFM2.5", _parse, _DEFAULTS, fallback=False, gguf=(_GGUF,)),
    "Lfm2MoeForCausalLM": Architecture(
        "lfm2_moe", "LFM2 with experts", _parse_experts, _MOE_DEFAULTS, experts=True, fallback=False
    ),
}
FAMILY = Family(
    "lfm2",
    LFM2,
    needs={"conv": "the short convolutions"},
    may_have=("experts",),
    lacks=("sliding_windows", "attention_scales", "attention_soft_cap"),
    hf_values=_hf_values,
)
