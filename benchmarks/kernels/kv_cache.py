"""Bandwidth of the KV cache writes at decode and prefill sizes: ``python -m benchmarks.kernels.kv_cache``.

The first lines have article S2's sizes: one new token of each of 128 to 2048 sequences, GPT-2's heads, blocks of 64.
"""

import torch
from torch import Tensor

from benchmarks.kernels.table import compare

_TOKENS = (32, 256, 8192)
# Sequences, heads, head size and tokens of a block in article S2.
_BATCHES = (128, 256, 512, 1024, 2048)
_HEADS, _SIZE, _BLOCK = 12, 64, 64
_BLOCK_SIZE = 16
_BLOCKS = 2048
_TURNS = 8


def main() -> None:
    """Write one line for each operator, model and implementation."""
    for batch in _BATCHES:
        _append(batch, _HEADS, _HEADS, _SIZE, _BLOCK)
    # Layers, heads, K/V heads and head size of GPT-2, Qwen3-0.6B and Llama-3.1-8B.
    for layers, heads, kv_heads, size in ((12, 12, 12, 64), (28, 16, 8, 128), (32, 32, 8, 128)):
        for tokens in _TOKENS:
            _append(tokens, heads, kv_heads, size, _BLOCK_SIZE)
        for pairs in (1, 32):
            _copy_blocks(pairs, layers, kv_heads, size)


def _append(tokens: int, heads: int, kv_heads: int, size: int, block_size: int) -> None:
    """K and V, views of the fused projection's output, go to scattered slots."""
    cache = torch.empty(2, _BLOCKS, kv_heads, block_size, size, dtype=torch.bfloat16, device="cuda")
    inputs = []
    for _ in range(_TURNS):
        fused = torch.randn(tokens, heads + 2 * kv_heads, size, dtype=torch.bfloat16, device="cuda")
        _, k, v = fused.split((heads, kv_heads, kv_heads), dim=1)
        inputs.append((cache, k, v, _rows(tokens, kv_heads, block_size)))
    shape = f"T={tokens} {kv_heads}x{size} of {block_size}"
    compare("kv_cache", "append", shape, inputs, moved=tokens * kv_heads * (8 * size + 8))


def _rows(tokens: int, kv_heads: int, block_size: int) -> Tensor:
    slots = torch.randperm(_BLOCKS * block_size, device="cuda")[:tokens, None]
    heads = torch.arange(kv_heads, device="cuda")
    return (slots // block_size * kv_heads + heads) * block_size + slots % block_size


def _copy_blocks(pairs: int, layers: int, kv_heads: int, size: int) -> None:
    cache = torch.empty(layers, 2, _BLOCKS, kv_heads, _BLOCK_SIZE, size, dtype=torch.bfloat16, device="cuda")
    blocks = torch.randperm(_BLOCKS, device="cuda")[: 2 * pairs * _TURNS].view(_TURNS, pairs, 2)
    inputs = [(cache, *turn.unbind(1)) for turn in blocks]
    moved = pairs * (2 * 2 * cache[:, :, 0].numel() + 16)
    compare("kv_cache", "copy_blocks", f"C={pairs} {layers}x2x{kv_heads}x{size}", inputs, moved=moved)


if __name__ == "__main__":
    main()
