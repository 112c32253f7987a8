"""Command R and Command R7B: attention and MLP in parallel, norms without bias, rotation of neighbouring channels."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from rosebatch.model.families.layer_norm_decoder import LayerNormDecoder
from rosebatch.model.family import GGUF, Architecture, Family, GGUFModel
from rosebatch.model.gguf import decoder as gguf_decoder
from rosebatch.model.hf.fields import attention_biases, decoder, every, layer_types, windows
from rosebatch.model.hf.rope import whole_rope
from rosebatch.model.rope import interleaved_qkv_order, pairs_to_halves
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import HeadLayerNorm


class Cohere(LayerNormDecoder):
    """See ``LayerNormDecoder``."""

    norm_bias = False

    def qkv_order(self) -> Tensor:
        """See ``interleaved_qkv_order``."""
        return interleaved_qkv_order(self.config)

    def load_qk_norm(self, prefix: str, weights: WeightSource) -> HeadLayerNorm:
        """See ``HeadLayerNorm``; the weights follow the order of the channels."""
        c, order = self.config, pairs_to_halves(self.config)

        def load(name: str, heads: int, own: range) -> Tensor:
            weight = weights.get(f"{prefix}self_attn.{name}_norm.weight", (heads, c.head_dim), fill=1.0)
            return weight[own.start : own.stop, order.to(weight.device)].contiguous()

        q_weight = load("q", c.num_heads, self.ops.shard.of(c.num_heads))
        k_weight = load("k", c.num_kv_heads, self.ops.shard.kv_heads(c.num_kv_heads))
        return HeadLayerNorm(q_weight, k_weight, c.norm_eps)


# Defaults of transformers' config classes.
_COHERE_DEFAULTS = {
    "max_position_embeddings": 8192,
    "layer_norm_eps": 1e-5,
    "logit_scale": 0.0625,
    "eos_token_id": 255001,
    "pad_token_id": 0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
_COHERE2_DEFAULTS = {**_COHERE_DEFAULTS, "sliding_window": 4096}
_COHERE_THETA = 500_000.0


def _parse_cohere(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    rope = whole_rope({"rope_theta": _COHERE_THETA, **values})
    return _shared(values) | {"qk_norm": values.get("use_qk_norm", False), "rope": rope}


def _parse_cohere2(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; layers without a window have no positions."""
    fields = _shared(values)
    kinds = layer_types(values, every(values.get("sliding_window_pattern", 4), fields["num_layers"]))
    return fields | {
        "sliding_windows": windows(values, kinds),
        "rotary_layers": [kind == "sliding_attention" for kind in kinds],
        "rope": whole_rope(values),
    }


def _shared(values: Mapping[str, Any]) -> dict[str, Any]:
    return decoder(values, "cohere", eps="layer_norm_eps") | {
        **attention_biases(values),
        "parallel_residual": True,
        "logit_multiplier": values["logit_scale"],
    }


_GGUF_LAYER_NAMES = {**gguf_decoder.ATTENTION, **gguf_decoder.MLP, "attn_norm": "input_layernorm"}


def _gguf_cohere(model: GGUFModel) -> dict[str, Any]:
    return _gguf_cohere_shared(model) | {"use_qk_norm": gguf_decoder.has(model, "attn_q_norm.weight")}


def _gguf_cohere2(model: GGUFModel) -> dict[str, Any]:
    return _gguf_cohere_shared(model) | {
        "sliding_window": model.need("attention.sliding_window"),
        "layer_types": gguf_decoder.layer_types(model, 4),
    }


def _gguf_cohere_shared(model: GGUFModel) -> dict[str, Any]:
    return gguf_decoder.decoder(model, layer_norm="layer_norm_eps") | {"logit_scale": model.need("logit_scale", float)}


_GGUF_COHERE2 = GGUF("cohere2", "model.layers", gguf_decoder.NAMES, _GGUF_LAYER_NAMES, _gguf_cohere2)
_GGUF_COHERE = replace(
    _GGUF_COHERE2,
    architecture="command-r",
    layer_names={**_GGUF_LAYER_NAMES, **gguf_decoder.HEAD_NORMS},
    config=_gguf_cohere,
    absent=lambda config: () if config["use_qk_norm"] else gguf_decoder.HEAD_NORMS,
)
ARCHITECTURES = {
    "CohereForCausalLM": Architecture(
        "cohere", "Command R, R+, Aya", _parse_cohere, _COHERE_DEFAULTS, gguf=(_GGUF_COHERE,)
    ),
    "Cohere2ForCausalLM": Architecture(
        "cohere2", "Command R7B, Command A", _parse_cohere2, _COHERE2_DEFAULTS, window=True, gguf=(_GGUF_COHERE2,)
    ),
}
FAMILY = Family("cohere", Cohere)
