"""Sampling by FlashInfer's kernels (https://flashinfer.ai, arXiv 2501.01005) in place of ``torch_sampling``.

FlashInfer keys its random numbers on one seed for the whole call and on the row's place in it; as of 0.6.15 that holds
even if each row brings its own seed. So a row's token depends on the rows beside it. The seed here is the first row's
random number. Needs the package ``flashinfer-python``, which compiles the kernels on their first call.
"""

import torch
from flashinfer import sampling as theirs
from torch import Tensor

from rosebatch_kernels.sampling.distribution import COLDEST, HOTTEST, only_finite


def sample(logits: Tensor, temperature: Tensor, uniform: Tensor) -> Tensor:
    """As ``torch_sampling.sample``; only ``uniform[0]`` matters."""
    seed, offset = _random(uniform)
    tokens: Tensor = theirs.sampling_from_probs(_probabilities(logits, temperature), seed=seed, offset=offset)
    return only_finite(tokens.long(), logits)


def sample_filtered(
    logits: Tensor, temperature: Tensor, uniform: Tensor, top_k: int, top_p: Tensor, min_p: Tensor
) -> Tensor:
    """As ``torch_sampling.sample_filtered``; only ``uniform[0]`` matters.

    If tokens tie with the k-th likeliest, FlashInfer may drop some of them.
    """
    probabilities = _probabilities(logits, temperature)
    seed, offset = _random(uniform)
    tokens: Tensor
    # This waits for the device, as the copies of these parameters did. FlashInfer's fast way has no min-p.
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
    return only_finite(tokens.long(), logits)


def _probabilities(logits: Tensor, temperature: Tensor) -> Tensor:
    """``[S, V]`` fp32, rows without gaps: FlashInfer's kernels take no stride.

    Those that sample in rounds might never end on a NaN, so it becomes 0 here.
    """
    finite = logits.float().nan_to_num()
    probabilities: Tensor = theirs.softmax(finite.contiguous(), temperature.clamp(COLDEST, HOTTEST))
    return probabilities


def _random(uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Seed and offset ``[1]`` int64, on the device: the kernels read them there, so the host does not wait."""
    seed = uniform[:1].view(torch.int64)
    return seed, torch.zeros_like(seed)
