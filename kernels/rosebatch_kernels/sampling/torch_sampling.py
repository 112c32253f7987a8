"""Sampling on a CPU: the likeliest tokens are sorted instead of the vocabulary; same tokens as the reference.

A row with a NaN or without a finite maximum gives ``NOT_FINITE``.
"""

import torch
from torch import Tensor

from rosebatch_kernels.common import host_waits
from rosebatch_kernels.common.tokens import NOT_FINITE
from rosebatch_kernels.sampling.distribution import lowest_kept, only_finite, pick, weights_of

# Candidates that are sorted before the whole vocabulary is. A full sort costs ten times as much, and the likeliest
# thousand tokens nearly always hold enough probability.
_NARROW = 1024


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row of ``logits [S, V]``: ``[S]`` int64, the lowest id if several tie."""
    # On a CPU, max finds the index in a quarter of argmax's time.
    best = logits.max(-1)
    return best.indices.masked_fill_(~best.values.isfinite(), NOT_FINITE)


def sample(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """A token of each row from the whole distribution.

    Args:
        logits: ``[S, V]``.
        temperature: ``[S]`` fp32, > 0.
        uniform: ``[S]`` fp64 in (0, 1), a random number for each row.

    Returns:
        ``[S]`` int64.
    """
    weights = weights_of(logits.float(), temperature)
    return only_finite(pick(weights.double().cumsum(-1), uniform), logits)


def sample_filtered(
    logits: Tensor, temperature: Tensor, uniform: Tensor, top_k: int, top_p: Tensor, min_p: Tensor | None
) -> Tensor:
    """A token of each row, from the tokens that temperature, top-k, top-p and min-p leave, in that order.

    Args:
        logits: ``[S, V]``.
        temperature: ``[S]`` fp32, > 0.
        uniform: ``[S]`` fp64 in (0, 1), a random number for each row.
        top_k: keep the tokens as likely as the k-th likeliest, in all rows; 0 keeps all.
        top_p: ``[S]`` fp32 in (0, 1]; keep the tokens whose likelier ones sum to less than this.
        min_p: ``[S]`` fp32 in [0, 1]; keep the tokens at least this share as likely as the likeliest; None if no row
            has this filter.

    Returns:
        ``[S]`` int64.
    """
    logits = logits.float()
    min_p = torch.zeros_like(top_p) if min_p is None else min_p
    vocab = logits.shape[-1]
    # Twice top_k leaves room for ties.
    width = min(2 * top_k or _NARROW, vocab)
    tokens, complete = _from_likeliest(logits, width, temperature, uniform, top_k, top_p, min_p)
    short = host_waits.places_of(~complete)
    if short.numel():
        wide, _ = _from_likeliest(
            logits[short], vocab, temperature[short], uniform[short], top_k, top_p[short], min_p[short]
        )
        tokens[short] = wide
    return only_finite(tokens, logits)


def _from_likeliest(
    logits: Tensor, width: int, temperature: Tensor, uniform: Tensor, top_k: int, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Tokens ``[S]`` from the ``width`` likeliest, and whether the filters keep no others, ``[S]`` bool."""
    vocab = logits.shape[-1]
    ranked, ids = logits.topk(width, dim=-1)
    border = ranked[:, min(top_k or vocab, width) - 1, None]
    weights = weights_of(ranked.double(), temperature).masked_fill_(ranked < border, 0.0)
    whole = top_k > 0 or width == vocab
    total = None if whole else weights_of(logits, temperature).double().sum(-1)
    lowest = lowest_kept(ranked, weights, temperature, top_p, min_p, border, total)
    if width == vocab:
        kept = weights_of(logits, temperature) * (logits >= lowest)
        return pick(kept.double().cumsum(-1), uniform), torch.ones_like(top_p, dtype=torch.bool)
    # Tokens outside may tie with the last candidate, so the filters must drop that one.
    complete = (ranked[:, -1:] < (border if top_k else lowest)).squeeze(-1)
    kept = ranked >= lowest
    # A GPU sorts candidates without weight in less time than the host would wait for their number.
    count = width if kept.is_cuda else max(host_waits.to_int(kept.sum(-1).max()), 1)
    ids, order = ids[:, :count].sort(-1)
    weights = (weights * kept).gather(-1, order)
    choice = pick(weights.cumsum(-1), uniform)
    return ids.gather(-1, choice[:, None]).squeeze(-1), complete
