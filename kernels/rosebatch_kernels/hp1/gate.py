"""What turns the scores of HP1 attention into the weights of its values."""

from typing import NamedTuple

import torch
from torch import Tensor

# Keys that the filter spans: a key and the two before it.
TAPS = 3


class Gate(NamedTuple):
    """The gate of a layer (source: article S4); ``rosebatch_kernels.hp1.reference`` says what it does.

    Attributes:
        taps: ``[heads, TAPS]`` fp32, what is subtracted of the key's own score, of the one before it, and so on.
        gamma: ``[heads]`` fp32, factor on the weights.
        relu_pre: whether only the positive part of a score is subtracted from others.
        clip_min, clip_max: bounds of a weight before ``gamma``.
    """

    taps: Tensor
    gamma: Tensor
    relu_pre: bool = True
    clip_min: float = 0.0
    clip_max: float = 1.0


def mean_taps(sigma: Tensor) -> Tensor:
    """The article's taps ``[heads, TAPS]``, which subtract ``sigma [heads]`` times the mean over the filter."""
    return (sigma.to(torch.float32) / TAPS)[:, None].repeat(1, TAPS)
