"""How a device's memory is divided, once the weights are in it: the KV cache, and what a step needs beside it."""

import os
from dataclasses import dataclass

import torch

from rosebatch.config import EngineConfig, ModelConfig
from rosebatch.engine.kv_cache import bytes_per_block
from rosebatch.errors import FlagError

# Tokens of a step where the user does not say. On a CPU, a step's activations should not outgrow its caches: 1024
# tokens at a time prefill a quarter faster than 4096 (docs/performance.md).
_BATCHED_TOKENS = {"cuda": 16384, "cpu": 1024}
# On a small GPU fewer, until a step takes no more than this share of what is free.
_FEWEST_TOKENS = 2048
_STEP_SHARE = 0.25
# Shares of what is then free that the KV cache takes: libraries and graphs want some as well.
_GPU_SHARE = 0.9
_CPU_SHARE = 0.25
_CPU_MOST = 4 << 30


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Blocks of the KV cache, and most tokens of a step."""

    num_blocks: int
    max_num_batched_tokens: int


def plan_memory(
    config: ModelConfig, limits: EngineConfig, block_size: int, dtype: torch.dtype, device: torch.device
) -> MemoryPlan:
    """Follow the limits where they say something, the device where they do not.

    Raises:
        FlagError: the KV cache has no room for a single block.
    """
    free = _free_memory(device)
    tokens = limits.max_num_batched_tokens or _BATCHED_TOKENS[device.type]
    if device.type == "cuda":
        step = step_bytes(config, tokens, limits.max_num_seqs, dtype)
        while not limits.max_num_batched_tokens and tokens > _FEWEST_TOKENS and step > _STEP_SHARE * free:
            tokens //= 2
            step = step_bytes(config, tokens, limits.max_num_seqs, dtype)
        memory = int(_GPU_SHARE * (free - step))
    else:
        memory = min(int(_CPU_SHARE * free), _CPU_MOST)
    memory = limits.kv_cache_memory or max(memory, 0)
    block = bytes_per_block(config, block_size, dtype)
    # More than every sequence at full length is of no use.
    most = limits.max_num_seqs * -(-config.max_model_len // block_size)
    blocks = min(memory // block, most)
    if blocks < 1 or blocks * block_size < 2:
        raise FlagError(f"--kv-cache-memory {memory}: a block of {block_size} tokens takes {block} bytes")
    return MemoryPlan(blocks, tokens)


def step_bytes(config: ModelConfig, tokens: int, seqs: int, dtype: torch.dtype) -> int:
    """What a GPU step of so many tokens allocates at most, and its logits; twice, because graphs keep memory apart."""
    qkv = (config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    # The MLP's input and both of its inner tensors, beside residuals and norms old and new.
    wide = 3 * config.intermediate_size + 4 * config.hidden_size + qkv
    return 2 * (tokens * wide + seqs * config.vocab_size) * dtype.itemsize


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if "SC_AVPHYS_PAGES" not in os.sysconf_names:
        return int(_CPU_MOST / _CPU_SHARE)
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
