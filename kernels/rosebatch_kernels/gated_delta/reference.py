"""PyTorch reference of the gated delta rule (arXiv 2412.06464), also used on a CPU.

Each token of each sequence is computed by itself, in operations whose shapes depend on the layer alone. So a sequence's
results depend neither on the others in its batch nor on the chunks of its prompt. They are fp32 at least, and float64
where the input is float64.
"""

import torch
from torch import Tensor

from rosebatch_kernels.common.causal_conv_reference import convolve
from rosebatch_kernels.common.chunks import PackedChunks
from rosebatch_kernels.common.cpu_activations import logistic, softplus
from rosebatch_kernels.gated_delta.layout import DeltaState, DeltaWeights

# Added to a head's sum of squares before the root, as in the models' own code.
_EPS = 1e-6


def decode(
    qkv: Tensor,
    a: Tensor,
    b: Tensor,
    state: DeltaState,
    slots: Tensor,
    positions: Tensor,
    limits: Tensor,
    weights: DeltaWeights,
) -> Tensor:
    """See ``rosebatch_kernels.gated_delta.decode``."""
    out = _empty(qkv, state)
    for row, (slot, position, limit) in enumerate(torch.stack((slots, positions, limits), 1).tolist()):
        if position < limit:
            token = slice(row, row + 1)
            out[token] = advance(qkv[token], a[token], b[token], state, slot, position, weights)
    return out


def prefill(
    qkv: Tensor, a: Tensor, b: Tensor, state: DeltaState, packed: PackedChunks, weights: DeltaWeights
) -> Tensor:
    """See ``rosebatch_kernels.gated_delta.prefill``; the tiles are not used."""
    out = _empty(qkv, state)
    for slot, first, position, count in packed.chunks.tolist():
        if count:
            rows = slice(first, first + count)
            out[rows] = advance(qkv[rows], a[rows], b[rows], state, slot, position, weights)
    return out


def gated_norm(x: Tensor, gate: Tensor, weight: Tensor, eps: float, activation: str = "silu") -> Tensor:
    """``rms_norm(x) · weight · silu(gate)`` of ``x, gate [T, heads, D]`` with ``weight [D]``; same dtype out.

    As in the models' own code, the normalised value is rounded to the input's dtype before the weight is applied. The
    product is rounded again before the gate is applied. With the ``activation`` ``sigmoid`` (Kimi Linear), only the
    result is rounded.
    """
    wide, wide_gate = x.float(), gate.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if activation == "sigmoid":
        return (normed * weight.float() * logistic(wide_gate)).to(x.dtype)
    normed = normed.to(x.dtype)
    return ((weight * normed).float() * (wide_gate * logistic(wide_gate))).to(x.dtype)


def advance(
    qkv: Tensor, a: Tensor, b: Tensor, state: DeltaState, slot: int, position: int, weights: DeltaWeights
) -> Tensor:
    """Successive tokens of one sequence, the first at ``position``: ``[n, value_heads · value_dim]``."""
    key_heads, value_heads, key_dim, value_dim = state.heads
    wide = torch.promote_types(qkv.dtype, torch.float32)
    mixed = convolve(qkv, state.inputs[slot], position, weights.conv, weights.conv_bias).to(wide)
    q, k, v = mixed.split([key_heads * key_dim] * 2 + [value_heads * value_dim], 1)
    group = value_heads // key_heads
    q, k = (_unit(x.unflatten(1, (key_heads, key_dim))).repeat_interleave(group, 1) for x in (q, k))
    q, v = q * key_dim**-0.5, v.unflatten(1, (value_heads, value_dim))
    rate = weights.log_rate.to(wide).exp()
    steps = softplus(a.to(wide) + weights.dt_bias.to(wide)).unflatten(1, (value_heads, -1))
    # Of each channel of a key, or one for all.
    decay = torch.exp(-rate[:, None] * steps)[..., None]
    beta = logistic(b.to(wide)) * weights.max_beta
    memory = state.memory[slot].to(wide)
    if position == 0:
        memory.zero_()
    out = torch.empty_like(v)
    for t in range(len(v)):
        memory *= decay[t]
        change = (v[t] - torch.bmm(k[t, :, None], memory)[:, 0]) * beta[t, :, None]
        memory.baddbmm_(k[t, :, :, None], change[:, None])
        torch.bmm(q[t, :, None], memory, out=out[t, :, None])
    state.memory[slot] = memory
    return out.flatten(1).to(qkv.dtype)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _EPS)


def _empty(qkv: Tensor, state: DeltaState) -> Tensor:
    _, value_heads, _, value_dim = state.heads
    return torch.empty(len(qkv), value_heads * value_dim, dtype=qkv.dtype, device=qkv.device)
