"""PyTorch reference of HP1 attention: the formula.

For query i and key j, with scores ``s_j = scale · q_i·k_j`` of the keys j ≤ i, ``r_j = max(s_j, 0)`` (or ``s_j`` itself
without ``relu_pre``) and ``r_j = 0`` for j < 0:

    z_j = s_j - taps_0 · r_j - taps_1 · r_(j-1) - taps_2 · r_(j-2)
    p_j = gamma · clamp(z_j, clip_min, clip_max)
    o_i = sum over j ≤ i of p_j · v_j

There is no denominator, so sums over parts of the keys are simply added.
"""

import torch
from torch import Tensor
from torch.nn import functional

from rosebatch_kernels.hp1.gate import TAPS, Gate
from rosebatch_kernels.paged_attention.reference import gather


def probabilities(scores: Tensor, gate: Gate) -> Tensor:
    """Weights of all keys, those behind the query's included, which the caller masks.

    Args:
        scores: ``[..., heads, rows, keys]``, scaled, in fp32 or float64; keys in order, from the sequence's first on.
        gate: of the heads.

    Returns:
        the same shape and dtype.
    """
    passed = scores.clamp_min(0) if gate.relu_pre else scores
    z = scores
    for tap in range(min(TAPS, scores.shape[-1])):
        earlier = functional.pad(passed[..., : passed.shape[-1] - tap], (tap, 0))
        z = z - gate.taps[:, tap].to(scores.dtype)[:, None, None] * earlier
    return gate.gamma.to(scores.dtype)[:, None, None] * z.clamp(gate.clip_min, gate.clip_max)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, scale: float, gate: Gate) -> Tensor:
    """Attention of queries over all keys of their sequences, computed in fp32 at least.

    Args:
        q: ``[B, heads, R, D]``.
        k, v: ``[B, kv_heads, keys, D]``; heads is a multiple of kv_heads.
        seen: bool, broadcast to ``[B, heads, R, keys]``: False for keys behind the query.
        scale: factor on q·k.
        gate: of the layer.

    Returns:
        ``[B, heads, R, D]`` in q's dtype.
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    # A key that nobody sees may hold anything.
    keys, values = (x.repeat_interleave(group, 1).to(wide) for x in (k, v))
    scores = q.to(wide) @ keys.transpose(-1, -2) * scale
    weights = probabilities(scores, gate).masked_fill(~seen, 0.0)
    return (weights @ values).to(q.dtype)


def decode(q: Tensor, cache: Tensor, rows: Tensor, mask: Tensor, scale: float, gate: Gate) -> Tensor:
    """As ``rosebatch_kernels.paged_attention.reference.decode``."""
    batch, heads, size = q.shape
    k, v = gather(cache, rows, batch, mask.shape[-1])
    return attend(q[:, :, None], k, v, mask == 0, scale, gate).reshape(batch, heads * size)


def prefill(q: Tensor, cache: Tensor, rows: Tensor, mask: Tensor, scale: float, gate: Gate) -> Tensor:
    """As ``rosebatch_kernels.paged_attention.reference.prefill``."""
    _, heads, size = q.shape
    tile, keys = mask.shape
    tiles = q.view(-1, tile, heads, size).transpose(1, 2)
    k, v = gather(cache, rows, len(tiles), keys)
    return attend(tiles, k, v, mask == 0, scale, gate).transpose(1, 2).reshape(-1, heads * size)
