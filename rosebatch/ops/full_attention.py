"""The kernels of attention over whole prompts."""

from rosebatch_kernels.full_attention import torch_full as gathered

__all__ = ["gathered"]
