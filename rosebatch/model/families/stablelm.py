"""StableLM: a gated MLP; rotary positions on a part of each head; in some models a norm of each head of q and k."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rosebatch.model.families.layer_norm_decoder import LayerNormDecoder
from rosebatch.model.family import EACH, GGUF, Architecture, Family, GGUFModel
from rosebatch.model.gguf import decoder as gguf_decoder
from rosebatch.model.hf.fields import decoder
from rosebatch.model.hf.rope import rope, rotary_dim, rotary_share
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import HeadLayerNorm


class StableLM(LayerNormDecoder):
    """See ``LayerNormDecoder``."""

    def load_qk_norm(self, prefix: str, weights: WeightSource) -> HeadLayerNorm:
        """Checkpoints hold a weight for each head."""
        c = self.config

        def load(name: str, heads: range) -> Tensor:
            names = [f"{prefix}self_attn.{name}_layernorm.norms.{head}.weight" for head in heads]
            return torch.stack([weights.get(name, (c.head_dim,), fill=1.0) for name in names])

        shard = self.ops.shard
        return HeadLayerNorm(load("q", shard.of(c.num_heads)), load("k", shard.kv_heads(c.num_kv_heads)), c.norm_eps)


# Defaults of transformers' config class.
_DEFAULTS = {
    "max_position_embeddings": 4096,
    "layer_norm_eps": 1e-5,
    "num_key_value_heads": 32,
    "eos_token_id": 0,
    "hidden_act": "silu",
}


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    fields = decoder(values, "stablelm", eps="layer_norm_eps")
    return fields | {
        "qkv_bias": values.get("use_qkv_bias", False),
        "qk_norm": values.get("qk_layernorm", False),
        "parallel_residual": values.get("use_parallel_residual", False),
        "rope": rope(values),
        "rotary_dim": rotary_dim(fields["head_dim"], rotary_share(values, 0.25)),
    }


_GGUF_LAYER_NAMES = {
    **gguf_decoder.ATTENTION,
    **gguf_decoder.MLP,
    **gguf_decoder.NORMS,
    "attn_q_norm": f"self_attn.q_layernorm.norms.{EACH}",
    "attn_k_norm": f"self_attn.k_layernorm.norms.{EACH}",
}


def _gguf_config(model: GGUFModel) -> dict[str, Any]:
    """A layer with one norm has attention and MLP in parallel: llama.cpp does not ask the key."""
    model.get("use_parallel_residual")
    return gguf_decoder.decoder(model, layer_norm="layer_norm_eps", partial=True) | {
        "use_qkv_bias": gguf_decoder.has(model, "attn_q.bias"),
        "qk_layernorm": gguf_decoder.has(model, "attn_q_norm.weight"),
        "use_parallel_residual": not gguf_decoder.has(model, "ffn_norm.weight"),
    }


def _gguf_biases(config: Mapping[str, Any]) -> tuple[str, ...]:
    return (*gguf_decoder.NORMS, "output_norm", *(gguf_decoder.QKV if config["use_qkv_bias"] else ()))


def _gguf_absent(config: Mapping[str, Any]) -> tuple[str, ...]:
    norms = () if config["qk_layernorm"] else tuple(gguf_decoder.HEAD_NORMS)
    return (*norms, *(("ffn_norm",) if config["use_parallel_residual"] else ()))


_GGUF = GGUF(
    "stablelm",
    "model.layers",
    gguf_decoder.NAMES,
    _GGUF_LAYER_NAMES,
    _gguf_config,
    biases=_gguf_biases,
    absent=_gguf_absent,
)
ARCHITECTURES = {"StableLmForCausalLM": Architecture("stablelm", "StableLM", _parse, _DEFAULTS, gguf=(_GGUF,))}
FAMILY = Family("stablelm", StableLM)
