"""PyTorch reference of HP1 attention over the paged cache: a loop over sequences, see ``paged_attention``'s own."""

import torch
from torch import Tensor

from rosebatch_kernels.hp1.gate import Gate
from rosebatch_kernels.hp1.reference import probabilities
from rosebatch_kernels.paged_attention.splits import DecodeWorkspace
from rosebatch_kernels.qkv.norms import QKNorm
from rosebatch_kernels.qkv.reference import prepare


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
    live = positions < limits
    if append:
        numbers = torch.arange(len(qkv), dtype=torch.int32, device=qkv.device)
        rows = torch.where(live, numbers, -1)
        qkv = qkv.clone()
        prepare(qkv, cache, block_table, rows, positions, num_heads=num_heads, rotary=rotary, qk_norm=qk_norm)
    out = torch.empty(len(qkv), num_heads * cache.shape[-1], dtype=qkv.dtype, device=qkv.device)
    for row in live.nonzero()[:, 0].tolist():
        q = qkv[row : row + 1]
        out[row] = _attend(q, cache, block_table[row], int(positions[row]), gate, num_heads, scale)[0]
    return out


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
    out = torch.empty(len(q), num_heads * cache.shape[-1], dtype=q.dtype, device=q.device)
    for sequence, first, position, count in tiles.tolist():
        rows = slice(first, first + count)
        out[rows] = _attend(q[rows], cache, block_table[sequence], position, gate, num_heads, scale)
    return out


def _attend(q: Tensor, cache: Tensor, table: Tensor, position: int, gate: Gate, num_heads: int, scale: float) -> Tensor:
    """Attention of successive tokens ``q [R, at least heads · D]`` of one sequence, the first at ``position``."""
    _, _, kv_heads, block_size, size = cache.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    end = position + len(q)
    blocks = table[: -(-end // block_size)].long()
    k, v = cache[:, blocks].transpose(2, 3).flatten(1, 2)[:, :end].to(wide)
    queries = q[:, : num_heads * size].unflatten(1, (kv_heads, -1, size)).to(wide)
    seen = torch.arange(end, device=q.device) <= torch.arange(position, end, device=q.device)[:, None]
    # [R, kv_heads, group, keys] -> [heads, R, keys]
    scores = (queries[:, :, :, None] * k.transpose(0, 1)[:, None]).sum(-1) * scale
    weights = probabilities(scores.flatten(1, 2).transpose(0, 1), gate) * seen
    grouped = weights.unflatten(0, (kv_heads, -1))[..., None]
    out: Tensor = (grouped * v.transpose(0, 1)[:, None, None]).sum(-2)
    return out.flatten(0, 1).transpose(0, 1).flatten(1).to(q.dtype)
