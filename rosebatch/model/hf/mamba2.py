"""Mamba2 layers of config.json -> fields of ``MambaConfig``, with the names that Bamba gave."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from rosebatch.host.model_files import shown
from rosebatch.model.hf.fields import UnservedError, size, supported

# Defaults of transformers' config classes.
MAMBA_DEFAULTS = {
    "mamba_n_heads": 128,
    "mamba_d_head": "auto",
    "mamba_n_groups": 1,
    "mamba_d_state": 256,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_conv_bias": True,
    "mamba_proj_bias": False,
}
_KINDS = {
    **dict.fromkeys(("linear_attention", "mamba"), True),
    **dict.fromkeys(("full_attention", "attention"), False),
}


def mamba(values: Mapping[str, Any], layers: Sequence[bool], inner: int | None = None) -> dict[str, Any]:
    """The layers with Mamba2.

    Args:
        values: of config.json, completed by ``MAMBA_DEFAULTS``.
        layers: whether a layer has it, for each layer.
        inner: channels of all heads; None if ``mamba_expand`` says so.
    """
    if inner is None:
        inner = size(values, "mamba_expand") * size(values, "hidden_size")
    heads = size(values, "mamba_n_heads")
    head_dim = inner // heads if values["mamba_d_head"] == "auto" else size(values, "mamba_d_head")
    if heads * head_dim != inner:
        raise ValueError(f"{heads} heads of Mamba2 of {head_dim} channels are not the {inner} that config.json says")
    require_free_steps(values)
    return {
        "layers": list(layers),
        "heads": heads,
        "head_dim": head_dim,
        "groups": size(values, "mamba_n_groups"),
        "state_size": size(values, "mamba_d_state"),
        "taps": size(values, "mamba_d_conv"),
        "conv_bias": values["mamba_conv_bias"],
        "proj_bias": values["mamba_proj_bias"],
    }


def mamba_layers(kinds: Sequence[Any]) -> list[bool]:
    """Whether a layer has Mamba2, by names of versions of transformers; else it has attention."""
    return [_KINDS[supported("layer_types", kind, _KINDS)] for kind in kinds]


def require_free_steps(values: Mapping[str, Any]) -> None:
    """Check that steps in time have no limits. transformers' prompts keep within them, its generated tokens do not."""
    limits = values.get("time_step_limit")
    if limits is None:
        return
    # transformers 5 writes a number that JSON lacks as an object.
    numbers = [each.get("__float__") if isinstance(each, dict) else each for each in limits]
    if numbers not in ([0.0, math.inf], [0.0, "Infinity"]):
        raise UnservedError(f"time_step_limit {shown(limits)} is not supported; supported is none, from 0 to infinity")
