"""The gate of HP1 attention: the parameters that turn scores into the weights of values."""

from typing import NamedTuple

import torch
from torch import Tensor


class Gate(NamedTuple):
    """The gate of a layer (source: article S4); ``rosebatch_kernels.hp1.reference`` has the formula.

    Attributes:
        taps: ``[heads, K]`` fp32: factors on the key's own score, on the score before it, and so on. The products are
            subtracted. Kernels are compiled for each K and keep K - 1 sums of a score in registers.
        gamma: ``[heads]`` fp32, factor on the weights.
        relu_pre: whether only the positive part of a score is subtracted.
        clip_min, clip_max: bounds of a weight before ``gamma``.
    """

    taps: Tensor
    gamma: Tensor
    relu_pre: bool = True
    clip_min: float = 0.0
    clip_max: float = 1.0

    def form(self, scale: float) -> "GateForm":
        """The form for scores that are yet to be scaled: the scale is applied to sums of values, which are fewer."""
        # One clamp does what the formula does in two.
        clip_min = min(max(self.clip_min, 0.0), self.clip_max)
        return GateForm(self.taps.shape[1], self.relu_pre, clip_min / scale, self.clip_max / scale)


class GateForm(NamedTuple):
    """What of a gate is constant in a kernel: the number of taps, and the rest of ``Gate``."""

    TAPS: int
    RELU_PRE: bool
    CLIP_MIN: float
    CLIP_MAX: float


def mean_taps(sigma: Tensor, taps: int) -> Tensor:
    """The article's taps ``[heads, taps]``: they subtract ``sigma [heads]`` times the mean over the filter."""
    return (sigma.to(torch.float32) / taps)[:, None].repeat(1, taps)
