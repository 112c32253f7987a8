"""PyTorch reference of Mamba2 (arXiv 2405.21060), also used on a CPU.

Each token of each sequence is computed by itself, in operations whose shapes depend on the layer alone. So a sequence's
results depend neither on the others in its batch nor on the chunks of its prompt. They are fp32 at least, and float64
where the input is float64.
"""

import torch
from torch import Tensor

from rosebatch_kernels.common.causal_conv_reference import convolve
from rosebatch_kernels.common.chunks import PackedChunks
from rosebatch_kernels.common.cpu_activations import logistic, softplus
from rosebatch_kernels.mamba2.layout import MambaState, MambaWeights


def decode(
    xbc: Tensor,
    dt: Tensor,
    state: MambaState,
    slots: Tensor,
    positions: Tensor,
    limits: Tensor,
    weights: MambaWeights,
) -> Tensor:
    """See ``rosebatch_kernels.mamba2.decode``."""
    out = _empty(xbc, state)
    for row, (slot, position, limit) in enumerate(torch.stack((slots, positions, limits), 1).tolist()):
        if position < limit:
            token = slice(row, row + 1)
            out[token] = advance(xbc[token], dt[token], state, slot, position, weights)
    return out


def prefill(xbc: Tensor, dt: Tensor, state: MambaState, packed: PackedChunks, weights: MambaWeights) -> Tensor:
    """See ``rosebatch_kernels.mamba2.prefill``; the tiles are not used."""
    out = _empty(xbc, state)
    for slot, first, position, count in packed.chunks.tolist():
        if count:
            rows = slice(first, first + count)
            out[rows] = advance(xbc[rows], dt[rows], state, slot, position, weights)
    return out


def gate_norm(x: Tensor, gate: Tensor, weight: Tensor | None, groups: int, eps: float) -> Tensor:
    """``rms_norm(x · silu(gate)) · weight`` of ``x, gate [T, C]`` with ``weight [C]``; rounded once, same dtype out.

    The norm is over each of the ``groups`` of neighbouring channels. Without a weight there is none.
    """
    wide_gate = gate.float()
    gated = x.float() * (wide_gate * logistic(wide_gate))
    if weight is None:
        return gated.to(x.dtype)
    by_group = gated.unflatten(1, (groups, -1))
    normed = by_group * torch.rsqrt(by_group.square().mean(-1, keepdim=True) + eps)
    out: Tensor = normed.flatten(1) * weight.float()
    return out.to(x.dtype)


def advance(xbc: Tensor, dt: Tensor, state: MambaState, slot: int, position: int, weights: MambaWeights) -> Tensor:
    """Successive tokens of one sequence, the first at ``position``: ``[n, heads · head_dim]``."""
    heads, head_dim, groups, size = state.heads
    wide = torch.promote_types(xbc.dtype, torch.float32)
    mixed = convolve(xbc, state.inputs[slot], position, weights.conv, weights.conv_bias).to(wide)
    x, b, c = mixed.split([heads * head_dim, groups * size, groups * size], 1)
    x = x.unflatten(1, (heads, head_dim))
    b, c = (each.unflatten(1, (groups, size)).repeat_interleave(heads // groups, 1) for each in (b, c))
    step = softplus(dt.to(wide) + weights.dt_bias.to(wide))
    decay = torch.exp(-weights.log_rate.to(wide).exp() * step)
    change, skip = x * step[:, :, None], weights.skip.to(wide)[:, None]
    memory = state.memory[slot].to(wide)
    if position == 0:
        memory.zero_()
    out = torch.empty_like(x)
    for t in range(len(x)):
        memory *= decay[t, :, None, None]
        memory.baddbmm_(change[t, :, :, None], b[t, :, None])
        torch.bmm(memory, c[t, :, :, None], out=out[t, :, :, None])
    state.memory[slot] = memory
    result: Tensor = out + skip * x
    return result.flatten(1).to(xbc.dtype)


def _empty(xbc: Tensor, state: MambaState) -> Tensor:
    heads, head_dim, *_ = state.heads
    return torch.empty(len(xbc), heads * head_dim, dtype=xbc.dtype, device=xbc.device)
