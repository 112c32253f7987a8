"""Sampling by FlashInfer's kernels (https://flashinfer.ai, arXiv 2501.01005) in place of ``torch_sampling``.

FlashInfer keys its random numbers on one seed for the whole call and on the row's place in it; as of 0.6.15 that holds
even if each row brings its own seed. So a row's token depends on the other rows. The seed here is the first row's
random number, read on the device: the host waits for nothing. Needs the package ``flashinfer-python``, which compiles
the kernels on their first call.
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
    logits: Tensor, temperature: Tensor, uniform: Tensor, top_k: int, top_p: Tensor, min_p: Tensor | None
) -> Tensor:
    """As ``torch_sampling.sample_filtered``; only ``uniform[0]`` matters.

    If tokens tie with the k-th likeliest, FlashInfer may drop some of them.
    """
    seed, offset = _random(uniform)
    # Their kernels take a k below the size of the vocabulary.
    top_k = top_k if top_k < logits.shape[-1] else 0
    tokens: Tensor
    if min_p is not None:
        probabilities = _probabilities(logits, temperature)
        if top_k:
            probabilities = theirs.top_k_renorm_probs(probabilities, top_k)
        probabilities = theirs.top_p_renorm_probs(probabilities, top_p)
        tokens = theirs.min_p_sampling_from_probs(probabilities, min_p, seed=seed, offset=offset)
    elif top_k:
        # No tensor of probabilities of the whole vocabulary from 65536 tokens on (source: article S0).
        tokens = theirs.top_k_top_p_sampling_from_logits(
            _scaled(logits, temperature), top_k, top_p, filter_apply_order="top_k_first", seed=seed, offset=offset
        )
    else:
        probabilities = _probabilities(logits, temperature)
        tokens = theirs.top_p_sampling_from_probs(probabilities, top_p, seed=seed, offset=offset)
    return only_finite(tokens.long(), logits)


def _probabilities(logits: Tensor, temperature: Tensor) -> Tensor:
    """``[S, V]`` fp32."""
    probabilities: Tensor = theirs.softmax(_finite(logits), temperature.clamp(COLDEST, HOTTEST))
    return probabilities


def _scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits over the temperature, ``[S, V]`` fp32; 0 for the likeliest token of each row."""
    finite = _finite(logits)
    # Subtract first: a temperature near 0 would make infinities, and their difference is NaN.
    below = finite - finite.amax(-1, keepdim=True)
    return below.div_(temperature.clamp(COLDEST, HOTTEST)[:, None])


def _finite(logits: Tensor) -> Tensor:
    """``[S, V]`` fp32, rows without gaps: their kernels take no stride.

    0 for NaN: their kernels that sample in rounds might never end on one.
    """
    return logits.float().nan_to_num().contiguous()


def _random(uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Seed and offset ``[1]`` int64, on the device: the kernels read them there, so the host does not wait."""
    seed = uniform[:1].view(torch.int64)
    return seed, torch.zeros_like(seed)
