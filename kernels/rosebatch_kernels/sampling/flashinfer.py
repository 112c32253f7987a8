"""FlashInfer's sampling kernels in place of the reference (https://flashinfer.ai, arXiv 2501.01005).

Their random numbers are keyed on one seed for the whole call and on the row's place in it, as of 0.6.15 even where
each row brings a seed of its own: so a row's token depends on what is sampled beside it. The seed here is the first
row's random number. Needs the package ``flashinfer-python``, which compiles these kernels when they are first called.
"""

import torch
from flashinfer import sampling as theirs
from torch import Tensor

from rosebatch_kernels.sampling.reference import COLDEST, HOTTEST


def sample(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """As ``reference.sample``, of which ``uniform[0]`` alone matters."""
    seed, offset = _random(uniform)
    tokens: Tensor = theirs.sampling_from_probs(_probabilities(logits, temperature), seed=seed, offset=offset)
    return tokens.long()


def sample_filtered(
    logits: Tensor, temperature: Tensor, uniform: Tensor, top_k: int, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """As ``reference.sample_filtered``, of which ``uniform[0]`` alone matters.

    Where the k-th likeliest token ties with others, theirs may drop some of them.
    """
    probabilities = _probabilities(logits, temperature)
    seed, offset = _random(uniform)
    tokens: Tensor
    # Waits for the device, as the copies of these parameters to it did. Their fast way knows no min-p.
    if min_p.any():
        if top_k:
            probabilities = theirs.top_k_renorm_probs(probabilities, top_k)
        probabilities = theirs.top_p_renorm_probs(probabilities, top_p)
        tokens = theirs.min_p_sampling_from_probs(probabilities, min_p, seed=seed, offset=offset)
    elif top_k:
        tokens = theirs.top_k_top_p_sampling_from_probs(
            probabilities, top_k, top_p, filter_apply_order="top_k_first", seed=seed, offset=offset
        )
    else:
        tokens = theirs.top_p_sampling_from_probs(probabilities, top_p, seed=seed, offset=offset)
    return tokens.long()


def _probabilities(logits: Tensor, temperature: Tensor) -> Tensor:
    """``[S, V]`` fp32, rows without gaps: their kernels know no stride."""
    probabilities: Tensor = theirs.softmax(logits.float().contiguous(), temperature.clamp(COLDEST, HOTTEST))
    return probabilities


def _random(uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Seed and offset ``[1]`` int64, on the device: read there, so that nobody waits for them."""
    seed = uniform[:1].view(torch.int64)
    return seed, torch.zeros_like(seed)
