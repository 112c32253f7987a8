"""GGUF's names and values of the gated delta rule, as Qwen3-Next and Qwen3.5 have it."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rosebatch.model.family import GGUFModel, integers
from rosebatch.model.gguf import decoder

_ATTENTION = {**decoder.ATTENTION, **decoder.HEAD_NORMS}
_NORMS = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
_STATE = {
    "ssm_a": "linear_attn.A_log",
    "ssm_dt.bias": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
_FUSED = {
    "attn_qkv": "linear_attn.in_proj_qkvz",
    "attn_gate": "linear_attn.in_proj_qkvz",
    "ssm_ba": "linear_attn.in_proj_ba",
}
_APART = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
}
# Names of tensors in layers of either kind, of Qwen3-Next and of Qwen3.5.
FUSED = {**_ATTENTION, **_NORMS, **_STATE, **_FUSED}
APART = {**_ATTENTION, **_NORMS, **_STATE, **_APART}
BARE = ("ssm_a",)


def config(model: GGUFModel, *, dense: bool = True) -> dict[str, Any]:
    """The fields of config.json, see ``decoder.decoder``, without experts."""
    fields = decoder.decoder(model, partial=True, dense=dense)
    layers, interval = model.without_drafts(), model.get("full_attention_interval", 4, integers(1))
    # Positions of text are equal in all of them.
    model.get("rope.dimension_sections")
    heads = model.need("ssm.time_step_rank", integers(1))
    return fields | {
        "num_hidden_layers": layers,
        "layer_types": ["linear_attention" if (i + 1) % interval else "full_attention" for i in range(layers)],
        "linear_conv_kernel_dim": model.need("ssm.conv_kernel"),
        "linear_num_key_heads": model.need("ssm.group_count"),
        "linear_num_value_heads": heads,
        "linear_key_head_dim": model.need("ssm.state_size"),
        "linear_value_head_dim": model.need("ssm.inner_size") // heads,
    }


def absent(config: Mapping[str, Any]) -> Collection[str]:
    """The tensors of the other kind of layer."""
    state = {*_STATE, *_FUSED, *_APART}
    kinds = enumerate(config["layer_types"])
    return {f"blk.{i}.{name}" for i, kind in kinds for name in (_ATTENTION if kind == "linear_attention" else state)}


def values(name: str, values: NDArray[np.float32], config: Mapping[str, Any]) -> NDArray[np.float32]:
    """What both have: norms are stored plus one, rates of decay as such, and the convolution without its middle."""
    if name.endswith("A_log"):
        if not (values < 0).all():
            raise ValueError("not all values of ssm_a are negative")
        return np.log(-values)
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return values - 1
    return values[:, None] if name.endswith("conv1d.weight") else decoder.shared_gate(name, values, config)


def fused(name: str, given: NDArray[np.float32], config: Mapping[str, Any]) -> NDArray[np.float32]:
    """Of Qwen3-Next: rows of q, k and v, or of the gate, as ``[key heads, rows, in]``."""
    if not name.endswith("in_proj_qkvz.weight"):
        return values(name, given, config)
    heads, width, value_rows = _sizes(config)
    parts = [given] if len(given) == value_rows else np.split(given, [heads * width, 2 * heads * width])
    return np.concatenate([part.reshape(heads, -1, given.shape[1]) for part in parts], 1)


def join(parts: list[Tensor]) -> Tensor:
    """The rows of each key head, one after the other."""
    return torch.cat(parts, 1).flatten(0, 1)


def apart(name: str, given: NDArray[np.float32], config: Mapping[str, Any]) -> NDArray[np.float32]:
    """Of Qwen3.5: its files have the first value head of each key head, then the second of each."""
    given, own = values(name, given, config), name.rpartition("linear_attn.")[2]
    if own == name or own == "norm.weight":
        return given
    _, _, value_rows = _sizes(config)
    if own == "out_proj.weight":
        return _grouped(given.T, config).T
    # In front of them are the rows of q and k.
    rows = value_rows if own.startswith(("in_proj_qkv", "in_proj_z", "conv1d")) else config["linear_num_value_heads"]
    return np.concatenate([given[:-rows], _grouped(given[-rows:], config)])


def _grouped(rows: NDArray[np.float32], config: Mapping[str, Any]) -> NDArray[np.float32]:
    """Rows of value heads, by key head."""
    key_heads = config["linear_num_key_heads"]
    group = config["linear_num_value_heads"] // key_heads
    return rows.reshape(group, key_heads, -1, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def _sizes(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Key heads, their width, and the rows of all value heads."""
    value_rows = config["linear_num_value_heads"] * config["linear_value_head_dim"]
    return config["linear_num_key_heads"], config["linear_key_head_dim"], value_rows
