"""What the families' GGUF tables share: names of tensors, and metadata, from which llama.cpp computes."""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rosebatch.host.model_files import shown
from rosebatch.model.family import GGUFModel, integers, list_of
from rosebatch.model.hf.fields import every

NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
QKV = ("attn_q", "attn_k", "attn_v")
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def decoder(
    model: GGUFModel,
    *,
    layer_norm: str = "",
    partial: bool = False,
    unnamed: str = "linear",
    dense: bool = True,
    kv_heads: int | None = None,
) -> dict[str, Any]:
    """The fields of config.json that all decoders with rotary positions have.

    Args:
        model: the file.
        layer_norm: config.json's name of LayerNorm's epsilon; without one, the norms are RMSNorms.
        partial: whether a part of each head may be rotated.
        unnamed: the scaling of positions in a file that names none.
        dense: whether the file has to name the size of MLPs without experts.
        kv_heads: heads of keys and values, see ``attending``; None: as many as the file has in all layers.
    """
    heads, length = model.need("attention.head_count", integers(1)), model.need("context_length")
    hidden = model.need("embedding_length", integers(heads))
    head_dim = model.get("attention.key_length", hidden // heads, integers(1))
    model.require("attention.value_length", head_dim)
    rotated = model.get("rope.dimension_count", head_dim)
    if not partial:
        model.require("rope.dimension_count", head_dim)
    return {
        "hidden_size": hidden,
        "intermediate_size": model.need("feed_forward_length") if dense else model.get("feed_forward_length", 0),
        "num_hidden_layers": model.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads or model.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": length,
        layer_norm or "rms_norm_eps": model.need(f"attention.layer_norm_{'' if layer_norm else 'rms_'}epsilon", float),
        "rope_parameters": rope(model, rotated, length, unnamed)
        | ({"partial_rotary_factor": _share(rotated, head_dim)} if partial else {}),
    }


def llama(model: GGUFModel) -> dict[str, Any]:
    """The same of Llama. A scale or a window that changes nothing may be named."""
    values = decoder(model)
    scale = model.get("attention.scale", 0.0)
    if not math.isclose(scale, values["head_dim"] ** -0.5, rel_tol=1e-6):
        model.require("attention.scale", 0.0)
    if model.get("attention.sliding_window", 0) < values["max_position_embeddings"]:
        model.require("attention.sliding_window", 0)
    return {
        **values,
        "hidden_act": "silu",
        "attention_bias": has(model, "attn_q.bias"),
        "mlp_bias": has(model, "ffn_gate.bias"),
    }


def attending(model: GGUFModel, layers: int) -> tuple[list[bool], int]:
    """Which layers have attention, and with how many heads of keys and values: files have a list, 0 for the others."""
    counts = model.need("attention.head_count_kv", list_of(integers(), model.need("block_count")))[:layers]
    if len({0, *counts}) != 2:
        raise ValueError(f"the layers have {shown(counts)} heads of keys and values: all with any have as many")
    return [count > 0 for count in counts], max(counts)


def has(model: GGUFModel, name: str) -> bool:
    """Whether the first layer has a tensor."""
    return f"blk.0.{name}" in model.names


def biases(config: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of projections that have biases, by Llama's two options."""
    return (*(ATTENTION if config["attention_bias"] else ()), *(MLP if config.get("mlp_bias") else ()))


def layer_types(model: GGUFModel, interval: int) -> list[str]:
    """Which layers have a window: the file says so of each, or all have but each ``interval``-th."""
    pattern = model.get("attention.sliding_window_pattern", interval, integers() | list[bool])
    if isinstance(pattern, list):
        return ["sliding_attention" if windowed else "full_attention" for windowed in pattern]
    return every(pattern, model.need("block_count"))


def halves(name: str, values: NDArray[np.float32], config: Mapping[str, Any]) -> NDArray[np.float32]:
    """Reorder the rows of Llama's q and k: files interleave the channels for RoPE, transformers stores two halves."""
    match = re.search(r"\.self_attn\.([qk])_proj\.", name)
    if match is None:
        return values
    heads, shape = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"], values.shape
    return values.reshape(heads, shape[0] // heads // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


def less_one(name: str, values: NDArray[np.float32], _: Mapping[str, Any]) -> NDArray[np.float32]:
    """The weights of norms as Gemma's checkpoints have them; its files have them plus one."""
    return values - 1 if name.endswith("norm.weight") else values


def shared_gate(name: str, values: NDArray[np.float32], _: Mapping[str, Any]) -> NDArray[np.float32]:
    """The gate of a shared expert is one row."""
    return values.reshape(1, -1) if name.endswith("shared_expert_gate.weight") else values


def _share(rotated: int, head_dim: int) -> float:
    """The share of a head that is rotated, such that its product with ``head_dim`` is not rounded below ``rotated``."""
    share = rotated / head_dim
    return share if int(head_dim * share) == rotated else math.nextafter(share, 1.0)


def rope(model: GGUFModel, rotated: int, length: int, unnamed: str) -> dict[str, Any]:
    """Rotary positions. Divisors of each channel pair are those of longrope, which has such numbers.

    Args:
        model: the file.
        rotated: channels that are rotated.
        length: in tokens, that the model was made for.
        unnamed: the scaling in a file that names none.
    """
    found: dict[str, Any] = {"rope_theta": model.get("rope.freq_base", 10000.0)}
    # The second name is the older one.
    factors = [model.get(f"rope.{name}", 0.0) for name in ("scaling.factor", "scale_linear")]
    factor = factors[0] or factors[1] or 1.0
    kind = model.get("rope.scaling.type", unnamed)
    trained = model.get("rope.scaling.original_context_length", length)
    attention = model.get("rope.scaling.attn_factor", 1.0) * model.get("rope.scaling.yarn_attn_factor", 1.0)
    betas = {name: model.get(f"rope.scaling.yarn_{name}", kind=float) for name in ("beta_fast", "beta_slow")}
    if kind == "yarn":
        model.require("rope.scaling.yarn_ext_factor", 1.0, -1.0)
        growth = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        found |= {"rope_type": kind, "factor": factor, "attention_factor": growth * attention}
        found |= {name: value for name, value in betas.items() if value is not None}
        return found | {"original_max_position_embeddings": trained}
    if kind == "longrope":
        short, long = (model.values(f"rope_factors_{name}.weight") for name in ("short", "long"))
        return found | _divided(short, long, trained, attention)
    model.require("rope.scaling.type", "linear", "none")
    divisors, scale = model.values("rope_freqs.weight"), factor if kind == "linear" else 1.0
    if divisors is None and attention == 1.0:
        return found | ({"rope_type": "default"} if scale == 1.0 else {"rope_type": "linear", "factor": scale})
    # The divisors of Llama 3 among them.
    every_pair = scale * (np.ones(rotated // 2, np.float32) if divisors is None else divisors)
    return found | _divided(every_pair, every_pair, length, attention)


def _divided(
    short: NDArray[np.float32] | None, long: NDArray[np.float32] | None, trained: int, attention: float
) -> dict[str, Any]:
    return {
        "rope_type": "longrope",
        "short_factor": [] if short is None else short.flatten().tolist(),
        "long_factor": [] if long is None else long.flatten().tolist(),
        "original_max_position_embeddings": trained,
        "attention_factor": attention,
        "factor": 1.0,
    }
