"""Gemma 2 and 3 (text): norms before and after each sub-layer, whose weights are stored less one."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.host.model_files import shown
from rosebatch.model.families.llama import Llama
from rosebatch.model.family import GGUF, Architecture, Family, GGUFModel
from rosebatch.model.gguf import decoder as gguf_decoder
from rosebatch.model.hf.fields import attention_biases, decoder, decoder_values, every, layer_types, refuse, windows
from rosebatch.model.hf.rope import ropes_by_type, whole_rope
from rosebatch.model.mixers.bidirectional_attention.sublayer import load_bidirectional_attention
from rosebatch.model.sublayers import Mixer
from rosebatch.model.weights import WeightSource


class Gemma(Llama):
    """See ``Llama``."""

    post_attention_norm_name: ClassVar[str | None] = "post_attention_layernorm"
    mlp_norm_name = "pre_feedforward_layernorm"
    post_mlp_norm_name: ClassVar[str | None] = "post_feedforward_layernorm"
    scales_vectors = False

    def load_paged_attention(self, index: int, prefix: str, weights: WeightSource, **options: Any) -> Mixer:
        """See ``Llama``; EmbeddingGemma's tokens see those after them."""
        if not self.config.bidirectional:
            return super().load_paged_attention(index, prefix, weights, **options)
        names, out = [prefix + name for name in self.qkv_names], f"{prefix}self_attn.o_proj"
        return load_bidirectional_attention(self.config, self.ops, weights, index, names, out, **options)

    def load_norm(self, name: str, size: int, weights: WeightSource) -> Tensor:
        """``1 + weight`` in fp32: only the normed result is rounded."""
        return 1 + weights.get(f"{name}.weight", (size,), dtype=torch.float32, fill=0.0)


# Defaults of transformers' config classes. Gemma 3's folders leave out sizes that equal them.
_GEMMA3_DEFAULTS = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "eos_token_id": 1,
    "pad_token_id": 0,
    # It has no effect in transformers either.
    "attn_logit_softcapping": None,
}
_GEMMA2_DEFAULTS = {
    **_GEMMA3_DEFAULTS,
    "vocab_size": 256_000,
    "max_position_embeddings": 8192,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": 50.0,
}


def _parse_gemma2(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    refuse(values, "use_bidirectional_attention")
    fields = _shared(values, interval=2)
    return fields | {"attention_soft_cap": values["attn_logit_softcapping"] or 0.0, "rope": whole_rope(values)}


def _parse_gemma3(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; sliding layers have positions of their own."""
    full, sliding = ropes_by_type(values, theta=1_000_000.0, sliding_theta=10_000.0)
    both = values.get("use_bidirectional_attention") or False
    if type(both) is not bool:
        raise ValueError(f"use_bidirectional_attention must be true or false, got {shown(both)}")
    if both:
        # So many keys on each side, as transformers counts them.
        values = {**values, "sliding_window": values["sliding_window"] // 2 + 1}
    fields = _shared(values, interval=values.get("sliding_window_pattern", 6))
    fields |= {"bidirectional": True, "head": False, "logit_soft_cap": 0.0} if both else {}
    return fields | {"qk_norm": True, "rope": full, "sliding_rope": sliding}


def _parse_bare(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same without an output projection."""
    return _parse_gemma3(values) | {"head": False}


def _shared(values: Mapping[str, Any], interval: Any) -> dict[str, Any]:
    fields = decoder(values, "gemma", activation="hidden_activation")
    layers = fields["num_layers"]
    return fields | {
        **attention_biases(values),
        "sliding_windows": windows(values, layer_types(values, every(interval, layers))),
        "attention_scales": [values["query_pre_attn_scalar"] ** -0.5] * layers,
        "logit_soft_cap": values.get("final_logit_softcapping") or 0.0,
        "embedding_multiplier": fields["hidden_size"] ** 0.5,
    }


def _hf_values(config: ModelConfig) -> dict[str, Any]:
    """Gemma 3: full layers with linear scaling or none."""
    rope, sliding = config.rope, config.sliding_rope
    assert rope is not None, "Gemma has rotary positions"
    return {
        **decoder_values(config),
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": config.activation,
        "query_pre_attn_scalar": round(config.attention_scale(0) ** -2),
        "sliding_window": max(config.sliding_windows, default=0),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in config.sliding_windows],
        "final_logit_softcapping": config.logit_soft_cap or None,
        "rope_theta": rope.theta,
        "rope_local_base_freq": sliding.theta if sliding else rope.theta,
        "rope_scaling": {"rope_type": "linear", "factor": rope.factor} if rope.scaling == "linear" else None,
    }


def _gguf_gemma2(model: GGUFModel) -> dict[str, Any]:
    return {
        **_gguf_shared(model, largest=46),
        "attn_logit_softcapping": model.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": model.get("final_logit_softcapping", 30.0),
        "sliding_window": model.get("attention.sliding_window", 4096),
        "layer_types": gguf_decoder.layer_types(model, 2),
    }


def _gguf_gemma3(model: GGUFModel) -> dict[str, Any]:
    """Only full layers have the scaling of positions. A file without a window has full layers alone."""
    fields, window = _gguf_shared(model, largest=62), model.get("attention.sliding_window", 0)
    sliding = {"rope_type": "default", "rope_theta": model.get("rope.freq_base_swa", 10_000.0)}
    return {
        **fields,
        "final_logit_softcapping": model.get("final_logit_softcapping", 0.0) or None,
        "sliding_window": window or None,
        "layer_types": gguf_decoder.layer_types(model, 6 if window else 1),
        "rope_parameters": {"full_attention": fields["rope_parameters"], "sliding_attention": sliding},
    }


def _gguf_shared(model: GGUFModel, largest: int) -> dict[str, Any]:
    """The scale of attention is not in the file. llama.cpp has another one for the model of so many layers."""
    fields = gguf_decoder.decoder(model)
    wide = fields["num_hidden_layers"] == largest
    return fields | {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": fields["hidden_size"] // fields["num_attention_heads"] if wide else fields["head_dim"],
    }


_LAYER_NAMES = {
    **gguf_decoder.ATTENTION,
    **gguf_decoder.MLP,
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
GGUF_GEMMA2 = GGUF(
    "gemma2",
    "model.layers",
    gguf_decoder.NAMES,
    _LAYER_NAMES,
    _gguf_gemma2,
    values=gguf_decoder.less_one,
    pieces="gemma",
)
_GGUF_GEMMA3 = replace(
    GGUF_GEMMA2, architecture="gemma3", layer_names={**_LAYER_NAMES, **gguf_decoder.HEAD_NORMS}, config=_gguf_gemma3
)
ARCHITECTURES = {
    # Its text part alone: EmbeddingGemma.
    "Gemma3TextModel": Architecture("gemma3_text", "EmbeddingGemma", _parse_bare, _GEMMA3_DEFAULTS, window=True),
    "Gemma2ForCausalLM": Architecture(
        "gemma2", "Gemma 2", _parse_gemma2, _GEMMA2_DEFAULTS, window=True, gguf=(GGUF_GEMMA2,)
    ),
    "Gemma3ForCausalLM": Architecture(
        "gemma3_text", "Gemma 3", _parse_gemma3, _GEMMA3_DEFAULTS, window=True, gguf=(_GGUF_GEMMA3,)
    ),
}
FAMILY = Family("gemma", Gemma, bidirectional=True, hf_values=_hf_values)
