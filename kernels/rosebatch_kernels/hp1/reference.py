"""PyTorch reference of HP1 attention: the formula, and attention over the paged cache.

For query i and key j ≤ i, the score is ``s_j = scale · q_i·k_j``. The filter reads ``r_j = max(s_j, 0)``, or ``s_j``
itself without ``relu_pre``; ``r_j = 0`` for j < 0. Then, with K taps:

    z_j = s_j - taps_0 · r_j - taps_1 · r_(j-1) - … - taps_(K-1) · r_(j-K+1)
    p_j = gamma · clamp(max(z_j, 0), clip_min, clip_max)
    o_i = sum over j ≤ i of p_j · v_j

There is no denominator, so the sums over parts of the keys simply add up.
"""

from torch import Tensor
from torch.nn import functional

from rosebatch_kernels.common.each_sequence import Weigh, decode_each, prefill_each
from rosebatch_kernels.common.head_norms import HeadNorm
from rosebatch_kernels.common.shared_keys import SharedKeys
from rosebatch_kernels.common.splits import DecodeWorkspace
from rosebatch_kernels.hp1.gate import Gate
from rosebatch_kernels.qkv.reference import prepared


def probabilities(scores: Tensor, gate: Gate) -> Tensor:
    """Weights of all keys. The caller masks the keys after the query.

    Args:
        scores: ``[..., heads, rows, keys]``, scaled, in fp32 or float64; keys in order from the sequence's first.
        gate: of the heads.

    Returns:
        the same shape and dtype.
    """
    passed = scores.clamp_min(0) if gate.relu_pre else scores
    z = scores
    for tap in range(min(gate.taps.shape[1], scores.shape[-1])):
        earlier = functional.pad(passed[..., : passed.shape[-1] - tap], (tap, 0))
        z = z - gate.taps[:, tap].to(scores.dtype)[:, None, None] * earlier
    return gate.gamma.to(scores.dtype)[:, None, None] * z.clamp_min(0).clamp(gate.clip_min, gate.clip_max)


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
    qk_norm: HeadNorm | None = None,
    append: bool = True,
    sparse: bool = True,
    keys: SharedKeys | None = None,
) -> Tensor:
    """See ``rosebatch_kernels.hp1.decode``; the workspace, ``sparse`` and ``keys`` are not used."""
    live = positions < limits
    if append:
        qkv = prepared(qkv, cache, block_table, positions, live, num_heads=num_heads, rotary=rotary, qk_norm=qk_norm)
    return decode_each(qkv, cache, block_table, positions, live, _gated(scale, gate), num_heads=num_heads)


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
    return lambda products, own, last, key: probabilities(products * scale, gate) * (key <= last)
