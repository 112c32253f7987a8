"""PyTorch reference of sampling: inverse transform over the tokens that the filters keep.

Each filter is a threshold on the logit, so tokens that tie are kept or dropped together, and the choice runs through
the kept ones in the order of their ids: a token follows from the set that is kept, and no ranking of ties enters.
A row's token is a function of its logits, parameters and random number alone: rows in one call never touch each
other, so a completion does not depend on what is sampled beside it.
"""

import torch
from torch import Tensor

from rosebatch_kernels.sampling.philox import uniform as uniform_number

# Candidates sorted before the whole vocabulary is: a full sort costs ten times as much, and the likeliest
# thousand tokens nearly always hold enough probability.
_NARROW = 1024
# A temperature below the first is greedy in effect, and one above the second is the uniform distribution; fp32
# would round smaller ones to 0 and larger ones to infinity.
COLDEST, HOTTEST = 1e-30, 1e30
_WORD = 0xFFFFFFFF


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
    return _pick(weights.double().cumsum(-1), uniform)


def sample_filtered(
    logits: Tensor, temperature: Tensor, uniform: Tensor, top_k: int, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """A token of each row from what temperature, top-k, top-p and min-p leave, in that order.

    Args:
        logits: ``[S, V]``.
        temperature: ``[S]`` fp32, > 0.
        uniform: ``[S]`` fp64 in (0, 1).
        top_k: keep the tokens as likely as the k-th likeliest, for all rows; 0 keeps all.
        top_p: ``[S]`` fp32 in (0, 1]; keep the tokens for which the likelier ones sum to less than this.
        min_p: ``[S]`` fp32 in [0, 1]; keep the tokens at least this share as likely as the likeliest one.

    Returns:
        ``[S]`` int64.
    """
    logits = logits.float()
    vocab = logits.shape[-1]
    # Twice as many as are asked for leave room for ties.
    width = min(2 * top_k or _NARROW, vocab)
    tokens, complete = _from_likeliest(logits, width, temperature, uniform, top_k, top_p, min_p)
    short = (~complete).nonzero().squeeze(-1)
    if short.numel():
        wide, _ = _from_likeliest(
            logits[short], vocab, temperature[short], uniform[short], top_k, top_p[short], min_p[short]
        )
        tokens[short] = wide
    return tokens


def sample_rows(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seeds: Tensor,
    positions: Tensor,
) -> Tensor:
    """A token of each row, whatever its parameters: what the functions above compute, over the whole vocabulary.

    Args:
        logits: ``[S, V]``, rows at any stride.
        temperature: ``[S]`` fp32; 0 is greedy.
        top_k: ``[S]`` int32; 0 keeps all.
        top_p: ``[S]`` fp32 in (0, 1].
        min_p: ``[S]`` fp32 in [0, 1].
        seeds: ``[S, 2]`` int32, the low and the high word of each row's 64-bit seed.
        positions: ``[S]`` int32, that each sampled token will have.

    Returns:
        ``[S]`` int32.
    """
    vocab = logits.shape[-1]
    wide = logits.double()
    ranked = wide.sort(-1, descending=True).values
    k = torch.where(top_k > 0, top_k, vocab).clamp_max(vocab).long()
    border = ranked.gather(-1, k[:, None] - 1)
    weights = _weights(ranked, temperature).masked_fill_(ranked < border, 0.0)
    lowest = _lowest(ranked, weights, temperature, top_p, min_p, border)
    pairs = zip(seeds.tolist(), positions.tolist(), strict=True)
    numbers = [uniform_number((high & _WORD) << 32 | low & _WORD, position) for (low, high), position in pairs]
    uniform = torch.tensor(numbers, dtype=torch.float64, device=logits.device)
    sampled = _pick((_weights(wide, temperature) * (wide >= lowest)).cumsum(-1), uniform)
    return torch.where(temperature == 0, greedy(logits), sampled).int()


def _weights(logits: Tensor, temperature: Tensor) -> Tensor:
    """Unnormalised probabilities ``[S, V]`` in the dtype of ``logits``, the largest of each row exactly 1."""
    # The difference first: a temperature near 0 would otherwise make infinities of which nothing can be subtracted.
    below = logits - logits.amax(-1, keepdim=True)
    return below.div_(_heat(temperature)).exp_()


def _heat(temperature: Tensor) -> Tensor:
    return temperature[:, None].clamp(COLDEST, HOTTEST)


def _from_likeliest(
    logits: Tensor, width: int, temperature: Tensor, uniform: Tensor, top_k: int, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    """Sample among the ``width`` likeliest; also whether the filters keep nothing beside those, for each row."""
    vocab = logits.shape[-1]
    ranked, ids = logits.topk(width, dim=-1)
    border = ranked[:, min(top_k or vocab, width) - 1, None]
    weights = _weights(ranked.double(), temperature).masked_fill_(ranked < border, 0.0)
    whole = top_k > 0 or width == vocab
    total = None if whole else _weights(logits, temperature).double().sum(-1)
    lowest = _lowest(ranked, weights, temperature, top_p, min_p, border, total)
    if width == vocab:
        kept = _weights(logits, temperature) * (logits >= lowest)
        return _pick(kept.double().cumsum(-1), uniform), torch.ones_like(top_p, dtype=torch.bool)
    # Tokens that tie with the last candidate may stand outside, so neither filter may keep that.
    complete = (ranked[:, -1:] < (border if top_k else lowest)).squeeze(-1)
    kept = ranked >= lowest
    count = max(int(kept.sum(-1).max()), 1)
    ids, order = ids[:, :count].sort(-1)
    weights = (weights * kept).gather(-1, order)
    choice = _pick(weights.cumsum(-1), uniform)
    return ids.gather(-1, choice[:, None]).squeeze(-1), complete


def _lowest(
    ranked: Tensor,
    weights: Tensor,
    temperature: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    border: Tensor,
    total: Tensor | None = None,
) -> Tensor:
    """The lowest logit ``[S, 1]`` that is kept of ``ranked [S, N]``, largest first, all at least ``border [S, 1]``.

    ``weights [S, N]`` are fp64 and 0 below the border; their sum is ``total [S]`` where some stand outside.
    """
    cumulative = weights.cumsum(-1)
    goal = top_p.double() * (cumulative[:, -1] if total is None else total)
    # A token is in while the likelier ones fall short. All are at 1, where rounding would drop the last ones.
    kept = (cumulative - weights < goal[:, None]) | (top_p >= 1)[:, None]
    shares = _heat(temperature) * min_p.double().log()[:, None]
    kept &= (ranked >= border) & (ranked.double() - ranked[:, :1] >= shares)
    # The likeliest token stays, even where top-p rounds to 0.
    return ranked.gather(-1, (kept.sum(-1, keepdim=True) - 1).clamp_min_(0))


def _pick(cumulative: Tensor, uniform: Tensor) -> Tensor:
    """Index ``[S]`` at which the running sum ``[S, N]`` passes ``uniform [S]`` of its end."""
    # The first index whose sum exceeds the target: never a token of zero probability.
    index = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)
    # Past the end if no token has any probability, which is so if all logits are -inf.
    return index.squeeze(-1).masked_fill_(index.squeeze(-1) == cumulative.shape[-1], 0)
