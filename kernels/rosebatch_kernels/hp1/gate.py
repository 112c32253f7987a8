"""The gate of HP1 attention: the parameters that turn scores into the weights of values."""

from typing import NamedTuple

import torch
from torch import Tensor

# Keys that the filter spans: a key and the two before it.
TAPS = 3


class Gate(NamedTuple):
    """The gate of a layer (source: article S4); ``rosebatch_kernels.hp1.reference`` has the formula.

    Attributes:
        taps: ``[heads, TAPS]`` fp32: factors on the key's own score, on the score before it, and so on. The products
            are subtracted.
        gamma: ``[heads]`` fp32, factor on the weights.
        relu_pre: whether only the positive part of a score is subtracted.
        clip_min, clip_max: bounds of a weight before ``gamma``.
    """

    taps: Tensor
    gamma: Tensor
    relu_pre: bool = True
    clip_min: float = 0.0
    clip_max: float = 1.0


def mean_taps(sigma: Tensor) -> Tensor:
    """The article's taps ``[heads, TAPS]``: they subtract ``sigma [heads]`` times the mean over the filter."""
    return (sigma.to(torch.float32) / TAPS)[:, None].repeat(1, TAPS)
