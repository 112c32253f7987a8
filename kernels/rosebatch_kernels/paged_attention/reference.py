"""PyTorch reference of attention over the paged cache."""

from torch import Tensor

from rosebatch_kernels.common.each_sequence import Weigh, decode_each, prefill_each
from rosebatch_kernels.common.head_norms import QKNorm
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
    rotary: tuple[Tensor, Tensor] | None = None,
    qk_norm: QKNorm | None = None,
    append: bool = True,
) -> Tensor:
    """See ``rosebatch_kernels.paged_attention.decode``; the workspace is not used."""
    live = positions < limits
    if append:
        qkv = prepared(qkv, cache, block_table, positions, live, num_heads=num_heads, rotary=rotary, qk_norm=qk_norm)
    return decode_each(qkv, cache, block_table, positions, live, _softmax(scale, window), num_heads=num_heads)


def prefill(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    tiles: Tensor,
    *,
    num_heads: int,
    scale: float,
    window: int = 0,
) -> Tensor:
    """See ``rosebatch_kernels.paged_attention.prefill``."""
    return prefill_each(q, cache, block_table, tiles, _softmax(scale, window), num_heads=num_heads)


def _softmax(scale: float, window: int) -> Weigh:
    def weigh(products: Tensor, own: Tensor, key: Tensor) -> Tensor:
        seen = key <= own
        if window:
            seen &= key > own - window
        return (products * scale).masked_fill(~seen, float("-inf")).softmax(-1)

    return weigh
