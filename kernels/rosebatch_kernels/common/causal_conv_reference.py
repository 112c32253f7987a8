"""PyTorch reference of a causal convolution of each channel with SiLU, which continues where a sequence stands.

A token's result depends neither on the other tokens of its call nor on its place among them.
"""

import torch
from torch import Tensor

from rosebatch_kernels.common.cpu_activations import logistic


def convolve(x: Tensor, inputs: Tensor, position: int, conv: Tensor, bias: Tensor | None) -> Tensor:
    """SiLU of the convolution of successive tokens, rounded to their dtype; the sum is fp32 at least.

    Args:
        x: ``[n, C]``.
        inputs: ``[taps, C]``, the sequence's: that of position p lies in row ``p mod taps``. Its last ones replace
            those that are there.
        position: of the first token; before position 0 there are zeros.
        conv: ``[C, taps]``, of each channel; the last factor is that of the token itself.
        bias: ``[C]`` or None.
    """
    taps, end = len(inputs), position + len(x)
    before = inputs[[p % taps for p in range(position - taps + 1, position)]]
    before[: max(0, taps - 1 - position)] = 0
    whole = torch.cat((before, x))
    kept = range(max(position, end - taps), end)
    inputs[[p % taps for p in kept]] = x[len(x) - len(kept) :]
    wide = torch.promote_types(x.dtype, torch.float32)
    factors = conv.to(wide).t().contiguous()
    total = torch.zeros(x.shape, dtype=wide, device=x.device)
    for tap in range(taps):
        total += whole[tap : tap + len(x)].to(wide) * factors[tap]
    if bias is not None:
        total += bias.to(wide)
    return (total * logistic(total)).to(x.dtype)
