"""Routed experts of transformers' models, as a function that they call by name."""

from torch import Tensor
from torch.nn import Module

from rosebatch.model.fallback.attention import NAME


def register() -> None:
    """Make the function known to transformers."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, _experts)


def _experts(module: Module, hidden: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """transformers' grouped product; a trial run without weights needs only the shape."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    if hidden.device.type == "meta":
        return hidden.clone()
    out: Tensor = grouped_mm_experts_forward(module, hidden, top_k_index, top_k_weights)
    return out
