"""Inputs that several benches share: random tensors, attention heads as in ``configs/models``, and paged prompts."""

from typing import NamedTuple

import torch
from torch import Tensor


class Heads(NamedTuple):
    """Attention of a model's layer.

    Attributes:
        heads, kv_heads, size: query heads, K/V heads, channels of a head.
        rotary: channels that are rotated, 0 for none.
        qk_norm: whether heads are normalised.
        window: keys that a token sees, 0 for all.
        soft_cap: of scores, 0 for none.
        sinks: whether heads have sinks.
    """

    heads: int
    kv_heads: int
    size: int
    rotary: int = 0
    qk_norm: bool = False
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False


HEADS = {
    "GPT-2": Heads(12, 12, 64),
    "Qwen3-0.6B": Heads(16, 8, 128, rotary=128, qk_norm=True),
    "Llama-3.1-8B": Heads(32, 8, 128, rotary=128),
    "Phi-4-mini": Heads(24, 8, 128, rotary=96),
    "Gemma-2-9B": Heads(16, 8, 256, rotary=256, soft_cap=50.0),
    "Gemma-3-4B": Heads(8, 4, 256, rotary=256, qk_norm=True),
    "Gemma-3-4B local": Heads(8, 4, 256, rotary=256, qk_norm=True, window=1024),
    "gpt-oss-20b": Heads(64, 8, 64, rotary=64, sinks=True),
    "gpt-oss-20b local": Heads(64, 8, 64, rotary=64, window=128, sinks=True),
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
