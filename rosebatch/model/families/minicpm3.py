"""MiniCPM3: latent attention and dense MLPs, with multipliers on embeddings, sub-layers and logits."""

import math
from collections.abc import Mapping
from typing import Any

from rosebatch.model.families.deepseek import latents
from rosebatch.model.family import GGUF, Architecture, GGUFModel
from rosebatch.model.gguf import decoder as gguf_decoder
from rosebatch.model.gguf import latents as gguf_latents
from rosebatch.model.hf.fields import size

# Defaults of transformers' config class.
_DEFAULTS = {
    "num_hidden_layers": 62,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "kv_lora_rank": 256,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 64,
    "qk_rope_head_dim": 32,
    "v_head_dim": None,
    "scale_emb": 12,
    "scale_depth": 1.4,
    "dim_model_base": 256,
}


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``. What is null changes nothing."""
    hidden, layers = size(values, "hidden_size"), size(values, "num_hidden_layers")
    depth, base = values["scale_depth"], values["dim_model_base"]
    value_dim = values["v_head_dim"] or hidden // size(values, "num_attention_heads")
    return latents({**values, "v_head_dim": value_dim}, "deepseek", interleaved=False) | {
        "embedding_multiplier": values["scale_emb"],
        "residual_multiplier": 1.0 if depth is None else depth / math.sqrt(layers),
        "logit_multiplier": 1.0 if base is None else base / hidden,
    }


def _gguf_config(model: GGUFModel) -> dict[str, Any]:
    """The files name neither the multipliers nor the kind of scaling: they have its factors or not."""
    unnamed = "longrope" if "rope_factors_long.weight" in model.names else "linear"
    fields = gguf_latents.config(model, unnamed=unnamed)
    return fields | {name: _DEFAULTS[name] for name in ("scale_emb", "scale_depth", "dim_model_base")}


_GGUF = GGUF(
    "minicpm3",
    "model.layers",
    gguf_decoder.NAMES,
    {**gguf_latents.WHOLE, **gguf_decoder.MLP},
    _gguf_config,
)
ARCHITECTURES = {
    "MiniCPM3ForCausalLM": Architecture("minicpm3", "MiniCPM3", _parse, _DEFAULTS, gguf=(_GGUF,)),
}
