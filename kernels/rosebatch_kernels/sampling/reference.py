"""PyTorch reference of sampling: the whole vocabulary sorted, in fp64.

A row's token is a function of its logits, parameters and random number alone. Rows of one call never touch each other,
so a completion does not depend on the other rows.
"""

import torch
from torch import Tensor

from rosebatch_kernels.sampling.distribution import lowest_kept, only_finite, pick, weights_of
from rosebatch_kernels.sampling.philox import uniform as uniform_number

_WORD = 0xFFFFFFFF


def sample_rows(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """A token of each row, from the tokens that temperature, top-k, top-p and min-p leave, in that order.

    Args:
        logits: ``[S, V]``, rows at any stride.
        temperature: ``[S]`` fp32; 0 is greedy: the likeliest token, the lowest id if several tie.
        top_k: ``[S]`` int32; keep the tokens as likely as the k-th likeliest; 0 keeps all.
        top_p: ``[S]`` fp32 in (0, 1]; keep the tokens whose likelier ones sum to less than this.
        min_p: ``[S]`` fp32 in [0, 1]; keep the tokens at least this share as likely as the likeliest.
        seeds: ``[S, 2]`` int32, the low and the high word of each row's 64-bit seed.
        positions: ``[S]`` int32, of each sampled token.

    Returns:
        ``[S]`` int32; ``NOT_FINITE`` for a row with a NaN or without a finite maximum.
    """
    vocab = logits.shape[-1]
    wide = logits.double()
    ranked = wide.sort(-1, descending=True).values
    k = torch.where(top_k > 0, top_k, vocab).clamp_max(vocab).long()
    border = ranked.gather(-1, k[:, None] - 1)
    weights = weights_of(ranked, temperature).masked_fill_(ranked < border, 0.0)
    lowest = lowest_kept(ranked, weights, temperature, top_p, min_p, border)
    pairs = zip(seeds.tolist(), positions.tolist(), strict=True)
    numbers = [uniform_number((high & _WORD) << 32 | low & _WORD, position) for (low, high), position in pairs]
    uniform = torch.tensor(numbers, dtype=torch.float64, device=logits.device)
    sampled = pick((weights_of(wide, temperature) * (wide >= lowest)).cumsum(-1), uniform)
    return only_finite(torch.where(temperature == 0, logits.max(-1).indices, sampled), logits).int()
