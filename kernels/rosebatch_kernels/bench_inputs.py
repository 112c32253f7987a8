"""What several benches take as input: random tensors, and the attention heads of the models in ``configs/models``."""

import torch
from torch import Tensor

# Heads, K/V heads, head size, and whether positions are rotary and heads are normed.
HEADS = {
    "GPT-2": (12, 12, 64, False, False),
    "Qwen3-0.6B": (16, 8, 128, True, True),
    "Llama-3.1-8B": (32, 8, 128, True, False),
}


def randn(*shape: int) -> Tensor:
    """Normal random numbers in bf16 on the GPU."""
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")
