"""Inputs that several benches share: random tensors, attention heads as in ``configs/models``, and paged prompts."""

import torch
from torch import Tensor

# Heads, K/V heads, head size, whether positions are rotary, whether heads are normalised.
HEADS = {
    "GPT-2": (12, 12, 64, False, False),
    "Qwen3-0.6B": (16, 8, 128, True, True),
    "Llama-3.1-8B": (32, 8, 128, True, False),
}


def randn(*shape: int) -> Tensor:
    """Normal random numbers in bf16 on the GPU."""
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def block_table(sequences: int, length: int, block_size: int) -> Tensor:
    """``[sequences, blocks of each]`` int32: blocks in random order, as in a cache in use."""
    width = -(-length // block_size)
    return torch.randperm(sequences * width, device="cuda").int().view(sequences, width)


def prompt_tiles(sequences: int, length: int, rows: int) -> Tensor:
    """``[N, 4]`` int32: whole prompts in tiles of ``rows`` tokens, ordered as the engine orders them: longest first."""
    tiles = [
        (sequence, sequence * length + start, start, min(rows, length - start))
        for sequence in range(sequences)
        for start in range(0, length, rows)
    ]
    tiles.sort(key=lambda tile: -tile[2])
    return torch.tensor(tiles, dtype=torch.int32, device="cuda")
