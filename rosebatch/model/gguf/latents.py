"""GGUF's names and metadata of latent attention, as DeepSeek and MiniCPM3 have it."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from rosebatch.model.family import GGUFModel, integers
from rosebatch.model.gguf import decoder

Q = {"attn_q": "self_attn.q_proj"}
_Q_LATENT = {
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
}
_OTHERS = {
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_output": "self_attn.o_proj",
}
# What makes keys and values of a latent, in one matrix; newer files have those of keys, turned, and those of values.
_UP = "self_attn.kv_b_proj"
WHOLE = {**_Q_LATENT, **_OTHERS, "attn_kv_b": _UP, **decoder.NORMS}
SPLIT = {**_Q_LATENT, **_OTHERS, "attn_k_b": _UP, "attn_v_b": _UP, **decoder.NORMS}


def is_split(model: GGUFModel) -> bool:
    """Whether a file has ``SPLIT``'s names."""
    return decoder.has(model, "attn_k_b.weight")


def join(parts: list[Tensor]) -> Tensor:
    """``[heads, rank, keys]`` and ``[heads, values, rank]`` -> ``[heads · (keys + values), rank]``."""
    of_keys, of_values = parts
    return torch.cat([of_keys.mT, of_values], 1).flatten(0, 1)


def absent(config: Mapping[str, Any]) -> Collection[str]:
    """The tensors of the other way to make q."""
    return _Q_LATENT if config["q_lora_rank"] is None else Q


def config(model: GGUFModel, *, unnamed: str = "linear") -> dict[str, Any]:
    """The fields of config.json but for experts. Draft layers are left out.

    Files with ``SPLIT``'s names describe the latents as the one head of keys and values, and heads by other keys.
    """
    heads, length = model.need("attention.head_count", integers(1)), model.need("context_length")
    hidden, rank = model.need("embedding_length", integers(heads)), model.need("attention.kv_lora_rank", integers(1))
    rotated = model.need("rope.dimension_count", integers(1))
    sizes = [model.get(f"attention.{name}_length", hidden // heads, integers(1)) for name in ("key", "value")]
    if is_split(model):
        model.require("attention.key_length", rank + rotated)
        model.require("attention.value_length", rank)
        sizes = [model.need(f"attention.{name}_length_mla", integers(1)) for name in ("key", "value")]
    model.require("attention.head_count_kv", 1 if is_split(model) else heads)
    rope = decoder.rope(model, rotated, length, unnamed)
    # Where there is one, scores have a factor of it, and what is rotated has none. Elsewhere than in YaRN it is 1.
    growth = 10 * model.get("rope.scaling.yarn_log_multiplier", 0.0)
    if growth and rope["rope_type"] == "yarn":
        model.require("rope.scaling.attn_factor", 1.0)
        model.require("rope.scaling.yarn_attn_factor", 1.0)
        del rope["attention_factor"]
        rope |= {"mscale": growth, "mscale_all_dim": growth}
    return {
        "hidden_size": hidden,
        "intermediate_size": model.need("feed_forward_length"),
        "num_hidden_layers": model.without_drafts(),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "max_position_embeddings": length,
        "rms_norm_eps": model.need("attention.layer_norm_rms_epsilon", float),
        "rope_parameters": rope,
        "kv_lora_rank": rank,
        "q_lora_rank": model.get("attention.q_lora_rank", kind=integers(1)),
        "qk_nope_head_dim": sizes[0] - rotated,
        "qk_rope_head_dim": rotated,
        "v_head_dim": sizes[1],
    }
