"""PyTorch reference of attention over the paged cache as ``decode`` and ``prefill`` have it."""

from torch import Tensor

from rosebatch_kernels.paged_attention.each_sequence import Weigh, decode_each, prefill_each
from rosebatch_kernels.paged_attention.splits import DecodeWorkspace
from rosebatch_kernels.qkv.norms import QKNorm


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
    return decode_each(
        qkv,
        cache,
        block_table,
        positions,
        limits,
        _softmax(scale, window),
        num_heads=num_heads,
        rotary=rotary,
        qk_norm=qk_norm,
        append=append,
    )


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
