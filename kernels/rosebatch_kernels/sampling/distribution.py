"""The distribution that a token is drawn from, in PyTorch: weights, the filters' threshold, and the pick.

Each filter is a threshold on the logit, so it keeps or drops tokens that tie together. The pick runs through the kept
tokens in the order of their ids (inverse transform). So a token follows from the set of kept tokens, and the ranking of
ties plays no part.
"""

import torch
from torch import Tensor

from rosebatch_kernels.common.tokens import NOT_FINITE

# A temperature below the first is greedy in effect. One above the second gives the uniform distribution. fp32 would
# round smaller ones to 0 and larger ones to infinity.
COLDEST, HOTTEST = 1e-30, 1e30


def weights_of(logits: Tensor, temperature: Tensor) -> Tensor:
    """Unnormalised probabilities ``[S, V]`` in the dtype of ``logits``, the largest of each row exactly 1."""
    # Subtract first: a temperature near 0 would make infinities, and their difference is NaN.
    below = logits - logits.amax(-1, keepdim=True)
    return below.div_(_heat(temperature)).exp_()


def lowest_kept(
    ranked: Tensor,
    weights: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    border: Tensor,
    total: Tensor | None = None,
) -> Tensor:
    """The lowest logit ``[S, 1]`` that all filters keep.

    Args:
        ranked: ``[S, N]``, a row's largest logits, largest first.
        weights: ``[S, N]`` fp64, theirs; 0 below the border.
        temperature, top_p, min_p: ``[S]``.
        border: ``[S, 1]``, top-k's threshold.
        total: ``[S]`` fp64, sum of the weights of the whole row; None: ``ranked`` holds all tokens that top-k keeps.
    """
    cumulative = weights.cumsum(-1)
    goal = top_p.double() * (cumulative[:, -1] if total is None else total)
    # A token is kept while the likelier ones fall short of the goal. At 1 all are: rounding would drop the last ones.
    kept = (cumulative - weights < goal[:, None]) | (top_p >= 1)[:, None]
    shares = _heat(temperature) * min_p.double().log()[:, None]
    kept &= (ranked >= border) & (ranked.double() - ranked[:, :1] >= shares)
    # The likeliest token stays, even where top-p rounds to 0.
    return ranked.gather(-1, (kept.sum(-1, keepdim=True) - 1).clamp_min_(0))


def pick(cumulative: Tensor, uniform: Tensor) -> Tensor:
    """Index ``[S]`` where the running sum ``[S, N]`` passes ``uniform [S]`` times its end; 0 if the sum is 0."""
    # The first index whose sum exceeds the target: never a token of zero probability.
    index = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    # The search ends past the last index if no token has any probability: all logits are -inf.
    return index.squeeze(-1).masked_fill_(index.squeeze(-1) == cumulative.shape[-1], 0)


def only_finite(tokens: Tensor, logits: Tensor) -> Tensor:
    """The tokens ``[S]``, but ``NOT_FINITE`` where ``logits [S, V]`` have a NaN or no finite maximum."""
    # PyTorch's maximum of a row with a NaN is NaN.
    return tokens.masked_fill(~logits.amax(-1).isfinite(), NOT_FINITE)


def _heat(temperature: Tensor) -> Tensor:
    return temperature[:, None].clamp(COLDEST, HOTTEST)
