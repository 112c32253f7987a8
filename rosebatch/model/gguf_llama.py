"""How GGUF files hold Llama, Mixtral, Qwen2 and Qwen3. llama.cpp computes from these keys and tensors."""

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rosebatch.model.family import EACH, GGUF, GGUFModel

_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_ATTENTION = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_EXPERTS = {
    "ffn_gate_inp": "block_sparse_moe.gate",
    "ffn_gate_exps": f"block_sparse_moe.experts.{EACH}.w1",
    "ffn_up_exps": f"block_sparse_moe.experts.{EACH}.w3",
    "ffn_down_exps": f"block_sparse_moe.experts.{EACH}.w2",
}
_NORMS = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
_HEAD_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}


def _biases(config: Mapping[str, Any]) -> Collection[str]:
    return (*(_ATTENTION if config["attention_bias"] else ()), *(_MLP if config["mlp_bias"] else ()))


def _config(model: GGUFModel) -> dict[str, Any]:
    heads, hidden, length = (model.need(key) for key in ("attention.head_count", "embedding_length", "context_length"))
    head_dim = model.get("attention.key_length", hidden // heads)
    model.require("attention.value_length", head_dim)
    model.require("rope.dimension_count", head_dim)
    scale = model.get("attention.scale", 0.0)
    if not math.isclose(scale, head_dim**-0.5, rel_tol=1e-6):
        model.require("attention.scale", 0.0)
    if model.get("attention.sliding_window", 0) < length:
        model.require("attention.sliding_window", 0)
    return {
        "hidden_size": hidden,
        "intermediate_size": model.need("feed_forward_length"),
        "num_hidden_layers": model.need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": model.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": length,
        "rms_norm_eps": model.need("attention.layer_norm_rms_epsilon"),
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in model.names,
        "mlp_bias": "blk.0.ffn_gate.bias" in model.names,
        "rope_parameters": _rope(model, head_dim, length),
    }


def _mixtral_config(model: GGUFModel) -> dict[str, Any]:
    """Its experts are as wide as Llama's MLP."""
    counts = {"num_local_experts": model.need("expert_count"), "num_experts_per_tok": model.need("expert_used_count")}
    return {**_config(model), **counts, "attention_bias": False, "mlp_bias": False}


def _qwen2_config(model: GGUFModel) -> dict[str, Any]:
    """Its biases are no option."""
    return {**_config(model), "attention_bias": False, "mlp_bias": False}


def _qwen3_config(model: GGUFModel) -> dict[str, Any]:
    return {**_config(model), "mlp_bias": False}


def _rope(model: GGUFModel, head_dim: int, length: int) -> dict[str, Any]:
    """Rotary positions. Divisors of each channel pair are those of longrope, which has such numbers."""
    rope: dict[str, Any] = {"rope_theta": model.get("rope.freq_base", 10000.0)}
    # The second name is the older one.
    factors = [model.get(f"rope.{name}", 0.0) for name in ("scaling.factor", "scale_linear")]
    factor = factors[0] or factors[1] or 1.0
    # Without a kind, llama.cpp takes the factor as that of linear scaling.
    kind = model.get("rope.scaling.type", "linear")
    trained = model.get("rope.scaling.original_context_length", length)
    attention = model.get("rope.scaling.attn_factor", 1.0) * model.get("rope.scaling.yarn_attn_factor", 1.0)
    betas = {name: model.get(f"rope.scaling.yarn_{name}") for name in ("beta_fast", "beta_slow")}
    if kind == "yarn":
        model.require("rope.scaling.yarn_ext_factor", 1.0, -1.0)
        growth = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
        rope |= {"rope_type": kind, "factor": factor, "attention_factor": growth * attention}
        rope |= {name: value for name, value in betas.items() if value is not None}
        return rope | {"original_max_position_embeddings": trained}
    if kind == "longrope":
        short, long = (model.values(f"rope_factors_{name}.weight") for name in ("short", "long"))
        return rope | _divided(short, long, trained, attention)
    model.require("rope.scaling.type", "linear", "none")
    divisors, scale = model.values("rope_freqs.weight"), factor if kind == "linear" else 1.0
    if divisors is None and attention == 1.0:
        return rope | ({"rope_type": "default"} if scale == 1.0 else {"rope_type": "linear", "factor": scale})
    # The divisors of Llama 3 among them.
    every = scale * (np.ones(head_dim // 2, np.float32) if divisors is None else divisors)
    return rope | _divided(every, every, length, attention)


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


def _values(name: str, values: NDArray[np.float32], config: Mapping[str, Any]) -> NDArray[np.float32]:
    """Reorder the rows of q and k: GGUF interleaves the channels for RoPE, transformers stores two halves."""
    match = re.search(r"\.self_attn\.([qk])_proj\.", name)
    if match is None:
        return values
    heads, shape = config["num_attention_heads" if match[1] == "q" else "num_key_value_heads"], values.shape
    return values.reshape(heads, shape[0] // heads // 2, 2, *shape[1:]).swapaxes(1, 2).reshape(shape)


LLAMA = GGUF("llama", "model.layers", _NAMES, {**_ATTENTION, **_MLP, **_NORMS}, _biases, _config, _values)
MIXTRAL = replace(LLAMA, layer_names={**_ATTENTION, **_EXPERTS, **_NORMS}, biases=lambda _: (), config=_mixtral_config)
# Their rows of q and k are in transformers' order.
QWEN2 = GGUF(
    "qwen2", "model.layers", _NAMES, LLAMA.layer_names, lambda _: ("attn_q", "attn_k", "attn_v"), _qwen2_config
)
QWEN3 = replace(
    QWEN2, architecture="qwen3", layer_names={**LLAMA.layer_names, **_HEAD_NORMS}, biases=_biases, config=_qwen3_config
)
