"""Inputs that several benches share: random tensors, attention heads as in ``configs/models``, and paged prompts."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rosebatch_kernels.common.head_norms import HeadRMSNorm
from rosebatch_kernels.common.splits import DecodeWorkspace
from rosebatch_kernels.common.tiles import TILE_ROWS
from rosebatch_kernels.hp1.gate import Gate, mean_taps

# Tokens of a block of the KV cache.
BLOCK_SIZE = 64
# Caches that take turns, like the layers of a model.
_LAYERS = 4


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
HP1 = Heads(8, 4, 128, rotary=128)


def randn(*shape: int) -> Tensor:
    """Normal random numbers in bf16 on the GPU."""
    return torch.randn(shape, dtype=torch.bfloat16, device="cuda")


def block_table(sequences: int, length: int) -> Tensor:
    """``[sequences, blocks of each]`` int32: blocks in random order, as in a cache in use."""
    width = -(-length // BLOCK_SIZE)
    return torch.randperm(sequences * width, device="cuda").int().view(sequences, width)


def layers(shape: Heads, tokens: int, table: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Outputs of the QKV projection and caches, of several layers."""
    width, blocks = (shape.heads + 2 * shape.kv_heads) * shape.size, table.numel()
    return [(randn(tokens, width), randn(2, blocks, shape.kv_heads, BLOCK_SIZE, shape.size)) for _ in range(_LAYERS)]


def decode_options(
    shape: Heads, lengths: Sequence[int], num_splits: Callable[[int, int], int], *, shares: bool = False
) -> dict[str, Any]:
    """What each kernel of decode attention takes, for the last token of each sequence: the cache has all others."""
    limits, longest = torch.tensor(lengths, dtype=torch.int32, device="cuda"), max(lengths)
    heads = (shape.heads, shape.kv_heads, shape.size)
    return {
        "block_table": block_table(len(lengths), longest),
        "positions": limits - 1,
        "limits": limits,
        "workspace": DecodeWorkspace(len(lengths), *heads, torch.device("cuda"), num_splits, shares=shares),
        "num_heads": shape.heads,
        "scale": shape.size**-0.5,
        "rotary": (randn(longest, shape.rotary), randn(longest, shape.rotary)) if shape.rotary else None,
    }


def prefill_options(shape: Heads, sequences: int, length: int, before: int = 0) -> dict[str, Any]:
    """What each kernel of prefill attention takes, for chunks of tokens after ``before`` others in the cache.

    Tiles are ordered as the engine orders them: longest first.
    """
    tiles = [
        (sequence, sequence * length + start, before + start, min(TILE_ROWS, length - start))
        for sequence in range(sequences)
        for start in range(0, length, TILE_ROWS)
    ]
    tiles.sort(key=lambda tile: -tile[2])
    return {
        "block_table": block_table(sequences, before + length),
        "tiles": torch.tensor(tiles, dtype=torch.int32, device="cuda"),
        "num_heads": shape.heads,
        "scale": shape.size**-0.5,
    }


def head_norm(shape: Heads) -> HeadRMSNorm | None:
    """The norm of a model's query heads and K heads."""
    return HeadRMSNorm(randn(shape.size), randn(shape.size), 1e-6) if shape.qk_norm else None


def gate(sigma: float) -> Gate:
    """HP1's filter with one sigma for all heads."""
    taps = mean_taps(torch.full((HP1.heads,), sigma, device="cuda"), 3)
    return Gate(taps, torch.ones(HP1.heads, device="cuda"))
