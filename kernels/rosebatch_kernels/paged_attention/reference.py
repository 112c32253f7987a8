"""PyTorch reference of attention over the paged cache."""

from typing import Any

import torch
from torch import Tensor

from rosebatch_kernels.common.e4m3 import dequantized
from rosebatch_kernels.common.each_sequence import Weigh, decode_each, prefill_each
from rosebatch_kernels.common.head_norms import HeadNorm
from rosebatch_kernels.common.shared_keys import SharedKeys
from rosebatch_kernels.common.splits import DecodeWorkspace
from rosebatch_kernels.qkv.reference import prepared


def decode(
    qkv: Tensor,
    cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    limits: Tensor,
    workspace: DecodeWorkspace,
    *,
    num_heads: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    qk_norm: HeadNorm | None = None,
    append: bool = True,
    keys: SharedKeys | None = None,
    queries: int = 1,
    divided: bool = True,
    scales: Tensor | None = None,
) -> Tensor:
    """See ``rosebatch_kernels.paged_attention.decode``; the workspace is not used, and each row reads its own keys."""
    live = positions < limits
    block_table = block_table.repeat_interleave(queries, 0)
    if append:
        options: dict[str, Any] = {"num_heads": num_heads, "rotary": rotary, "qk_norm": qk_norm, "scales": scales}
        qkv = prepared(qkv, cache, block_table, positions, live, **options)
    if scales is not None:
        cache = dequantized(cache, scales)
    weigh = _softmax(scale, window, soft_cap, sinks)
    return decode_each(qkv, cache, block_table, positions, live, weigh, num_heads=num_heads, window=window)


def prefill(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    tiles: Tensor,
    *,
    num_heads: int,
    scale: float,
    window: int = 0,
    soft_cap: float = 0.0,
    sinks: Tensor | None = None,
    scales: Tensor | None = None,
    key_ends: Tensor | None = None,
) -> Tensor:
    """See ``rosebatch_kernels.paged_attention.prefill``."""
    if scales is not None:
        cache = dequantized(cache, scales)
    weigh = _softmax(scale, window, soft_cap, sinks)
    options: dict[str, Any] = {"num_heads": num_heads, "window": window, "key_ends": key_ends}
    return prefill_each(q, cache, block_table, tiles, weigh, **options)


def softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the keys of ``scores [..., heads, R, keys]``, and over ``sinks [heads]`` as one more key."""
    if sinks is None:
        return scores.softmax(-1)
    column = sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, column), -1).softmax(-1)[..., :-1]


def _softmax(scale: float, window: int, soft_cap: float, sinks: Tensor | None) -> Weigh:
    def weigh(products: Tensor, own: Tensor, last: Tensor, key: Tensor) -> Tensor:
        seen = key <= last
        if window:
            seen &= key > own - window
        scores = products * scale
        if soft_cap:
            scores = soft_cap * (scores / soft_cap).tanh()
        return softmax(scores.masked_fill(~seen, float("-inf")), sinks)

    return weigh
