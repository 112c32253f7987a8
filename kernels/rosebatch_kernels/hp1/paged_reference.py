"""PyTorch reference of HP1 attention over the paged cache as ``decode`` and ``prefill`` have it."""

from torch import Tensor

from rosebatch_kernels.hp1.gate import Gate
from rosebatch_kernels.hp1.reference import probabilities
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
    gate: Gate,
    *,
    num_heads: int,
    scale: float,
    rotary: tuple[Tensor, Tensor] | None = None,
    qk_norm: QKNorm | None = None,
    append: bool = True,
    sparse: bool = True,
) -> Tensor:
    """See ``rosebatch_kernels.hp1.decode``; the workspace is not used."""
    return decode_each(
        qkv,
        cache,
        block_table,
        positions,
        limits,
        _gated(scale, gate),
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
    gate: Gate,
    *,
    num_heads: int,
    scale: float,
) -> Tensor:
    """See ``rosebatch_kernels.hp1.prefill``."""
    return prefill_each(q, cache, block_table, tiles, _gated(scale, gate), num_heads=num_heads)


def _gated(scale: float, gate: Gate) -> Weigh:
    return lambda products, own, key: probabilities(products * scale, gate) * (key <= own)
