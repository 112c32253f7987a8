"""PyTorch reference of log-probabilities: as a CPU computes them, too."""

import torch
from torch import Tensor

from rosebatch_kernels.logprobs.layout import IDS, LOGPROB, RANK, width

# Rows that are ranked at once: numbers of 64 bits of many rows leave a CPU's cache.
_ROWS = 4


def logprob_rows(logits: Tensor, tokens: Tensor, limit: int, room: int) -> Tensor:
    """The log-probability of a token of each row, and the likeliest tokens of the row with theirs, likeliest first.

    Of equal logits the one with the lower id comes first. Nothing is fetched from the device, so a CUDA graph can hold
    it.

    Args:
        logits: ``[S, V]`` fp16, bf16 or fp32, rows at any stride. A row with a NaN or without a finite maximum has NaN
            for every log-probability.
        tokens: ``[S]`` int32 or int64, below V. The row of one below 0 has no meaning.
        limit: how many likeliest tokens; V if that is less. The places of others are 0.
        room: places for them; at least ``limit``.

    Returns:
        ``[S, width(room)]`` int32, see ``layout``; a token's rank is one more than the number of likelier tokens.
    """
    x, chosen = logits.float(), tokens.long().clamp_min(0)[:, None]
    logprobs = x.log_softmax(-1)
    rows = torch.zeros(len(x), width(room), dtype=torch.int32, device=x.device)
    rows[:, LOGPROB] = logprobs.gather(1, chosen)[:, 0].view(torch.int32)
    rows[:, RANK] = 1 + (x > x.gather(1, chosen)).sum(1)
    limit = min(limit, x.shape[1])
    if limit:
        ids = torch.cat([_likeliest(some, limit) for some in x.split(_ROWS)])
        rows[:, IDS : IDS + limit] = ids
        rows[:, IDS + room : IDS + room + limit] = logprobs.gather(1, ids).view(torch.int32)
    return rows


def _likeliest(x: Tensor, limit: int) -> Tensor:
    """Ids ``[S, limit]`` int64 of the largest numbers of ``x [S, V]`` fp32, in order."""
    # Adding 0 makes 0 of -0.
    bits = (x + 0.0).view(torch.int32)
    order = bits ^ (bits >> 31 & 0x7FFFFFFF)
    # All different, so that the order of equal numbers is no choice of ``topk``.
    keys = (order.long() << 32) - torch.arange(x.shape[1], device=x.device)
    return keys.topk(limit).indices
