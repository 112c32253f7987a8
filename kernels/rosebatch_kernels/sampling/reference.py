"""PyTorch reference of sampling: inverse transform over the filtered distribution.

A row's token is a function of its logits, parameters and random number alone: rows in one call never touch each
other, so a completion does not depend on what is sampled beside it.
"""

import torch
from torch import Tensor

# Candidates sorted before the whole vocabulary is: a full sort costs ten times as much, and the likeliest
# thousand tokens nearly always hold enough probability.
_NARROW = 1024
# A temperature below this is greedy in effect; fp32 would round smaller ones to 0.
_COLDEST = 1e-30


def greedy(logits: Tensor) -> Tensor:
    """The likeliest token of each row of ``logits [S, V]``: ``[S]`` int64, the lowest id where several tie."""
    # max finds the index in a quarter of the time that argmax takes on a CPU.
    return logits.max(-1).indices


def sample(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """A token of each row from the whole distribution.

    Args:
        logits: ``[S, V]``.
        temperature: ``[S]`` fp32, > 0.
        uniform: ``[S]`` fp64 in (0, 1).

    Returns:
        ``[S]`` int64.
    """
    weights = _weights(logits.float(), temperature)
    return _pick(weights.double().cumsum(-1), uniform).squeeze(-1)


def sample_filtered(
    logits: Tensor, temperature: Tensor, uniform: Tensor, top_k: int, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """A token of each row from what temperature, top-k, top-p and min-p leave, in that order.

    Args:
        logits: ``[S, V]``.
        temperature: ``[S]`` fp32, > 0.
        uniform: ``[S]`` fp64 in (0, 1).
        top_k: candidates kept by rank, for all rows; 0 keeps all.
        top_p: ``[S]`` fp32 in (0, 1]; the token that crosses it is kept.
        min_p: ``[S]`` fp32 in [0, 1].

    Returns:
        ``[S]`` int64.
    """
    weights = _weights(logits.float(), temperature)
    vocab = weights.shape[-1]
    width = min(top_k or _NARROW, vocab)
    tokens, enough = _from_ranked(weights, width, bool(top_k), uniform, top_p, min_p)
    if not top_k and width < vocab:
        short = (~enough).nonzero().squeeze(-1)
        if short.numel():
            wide, _ = _from_ranked(weights[short], vocab, True, uniform[short], top_p[short], min_p[short])
            tokens[short] = wide
    return tokens


def _weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """Unnormalised probabilities ``[S, V]`` in fp32, the largest of each row exactly 1."""
    # The difference first: a temperature near 0 would otherwise make infinities of which nothing can be subtracted.
    below = logits - logits.amax(-1, keepdim=True)
    return below.div_(temperature[:, None].clamp_min(_COLDEST)).exp_()


def _from_ranked(
    weights: Tensor, width: int, complete: bool, uniform: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample among the ``width`` likeliest; also whether those were all that the filters could keep, for each row.

    ``complete`` says that nothing outside the ``width`` likeliest has any probability left (top-k did that).
    """
    ranked, ids = weights.topk(width, dim=-1)
    cumulative = ranked.double().cumsum(-1)
    total = cumulative[:, -1] if complete else weights.double().sum(-1)
    # A token is in while the ones before it fall short of top-p.
    before = cumulative - ranked
    kept = (before < (top_p.double() * total)[:, None]) & (ranked >= min_p[:, None])
    # The likeliest token stays, even where top-p rounds to 0.
    last = (kept.sum(-1, keepdim=True) - 1).clamp_min_(0)
    enough = (last.squeeze(-1) < width - 1) | complete
    choice = _pick(cumulative, uniform, last)
    return ids.gather(-1, choice).squeeze(-1), enough


def _pick(cumulative: Tensor, uniform: Tensor, last: Tensor | None = None) -> Tensor:
    """Index ``[S, 1]`` at which the running sum passes ``uniform`` of the sum up to index ``last``."""
    total = cumulative[:, -1:] if last is None else cumulative.gather(-1, last)
    # The first index whose sum exceeds the target: never a token of zero probability.
    return torch.searchsorted(cumulative, uniform[:, None] * total, right=True)
