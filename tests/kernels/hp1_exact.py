"""The formula of HP1 attention in float64, one token and head at a time, and gates to try it with."""

import torch

from rosebatch_kernels.hp1.gate import Gate, mean_taps


def gated_attention(q, k, v, scale, gate):
    """One token's ``q [heads, D]`` over ``k`` and ``v [keys, kv_heads, D]``, its own the last of them."""
    group = len(q) // k.shape[1]
    out = []
    for head in range(len(q)):
        scores = k[:, head // group].double() @ q[head].double() * scale
        passed = scores.clamp_min(0) if gate.relu_pre else scores
        z = scores.clone()
        for back, tap in enumerate(gate.taps[head].tolist()):
            z[back:] -= tap * passed[: max(len(z) - back, 0)]
        weights = float(gate.gamma[head]) * z.clamp_min(0).clamp(gate.clip_min, gate.clip_max)
        out.append(weights @ v[:, head // group].double())
    return torch.cat(out)


def make_gate(heads, randn, device="cpu", *, sigma=None, taps=3, **options):
    """Sigma anywhere from 0 to 3, another for each head.

    Gammas so small that results are of size 1, as the tolerances take them to be: nothing else divides the sums.
    """
    sigmas = randn(heads).abs().clamp_max(2.99) if sigma is None else torch.full((heads,), float(sigma))
    return Gate(mean_taps(sigmas, taps).to(device), _gammas(heads, randn, device), **options)


def general_gate(heads, randn, device="cpu", *, taps=3, **options):
    """Taps that are no mean."""
    return Gate(randn(heads, taps).to(device), _gammas(heads, randn, device), **options)


def _gammas(heads, randn, device):
    return (0.25 + 0.125 * randn(heads)).to(device)
