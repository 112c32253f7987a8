"""GGUF's names, metadata and values of Mamba2."""

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rosebatch.model.family import GGUFModel, integers

BARE = ("ssm_a", "ssm_d")


def names(prefix: str) -> dict[str, str]:
    """GGUF's names of a layer's tensors -> transformers' names, which begin with ``prefix``."""
    found = {
        "ssm_in": "in_proj",
        "ssm_conv1d": "conv1d",
        "ssm_dt.bias": "dt_bias",
        "ssm_a": "A_log",
        "ssm_d": "D",
        "ssm_norm": "norm",
        "ssm_out": "out_proj",
    }
    return {name: prefix + other for name, other in found.items()}


def config(model: GGUFModel) -> dict[str, Any]:
    """The fields of config.json, with the names that Bamba gave."""
    heads, inner = model.need("ssm.time_step_rank", integers(1)), model.need("ssm.inner_size", integers(1))
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": model.need("ssm.group_count", integers(1)),
        "mamba_d_state": model.need("ssm.state_size", integers(1)),
        "mamba_d_conv": model.need("ssm.conv_kernel", integers(1)),
        "mamba_expand": inner // model.need("embedding_length", integers(1)),
        "mamba_conv_bias": has(model, "ssm_conv1d.bias"),
        "mamba_proj_bias": has(model, "ssm_in.bias"),
    }


def has(model: GGUFModel, name: str) -> bool:
    """Whether any layer has a tensor: not all are of one kind."""
    return any(each.endswith(f".{name}") for each in model.names)


def biases(config: Mapping[str, Any]) -> Collection[str]:
    """Names of those with a bias, of a config.json with these fields."""
    convolution = ("ssm_conv1d",) if config["mamba_conv_bias"] else ()
    return (*convolution, *(("ssm_in", "ssm_out") if config["mamba_proj_bias"] else ()))


def values(name: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rates of decay are stored as such; the rest has other dimensions. A group has a row of a norm."""
    if name.endswith(".A_log"):
        if not (values < 0).all():
            raise ValueError("not all values of ssm_a are negative")
        return np.log(-values).reshape(-1)
    if name.endswith((".D", "norm.weight")):
        return values.reshape(-1)
    return values[:, None] if name.endswith("conv1d.weight") else values
