"""PyTorch reference of the gated convolution, also used on a CPU.

A sequence's results depend neither on the others in its batch nor on the chunks of its prompt.
"""

import torch
from torch import Tensor

from rosebatch_kernels.common.chunks import PackedChunks


def prefill(x: Tensor, state: Tensor, packed: PackedChunks, weight: Tensor) -> Tensor:
    """See ``rosebatch_kernels.short_conv.kernel.prefill``; the tiles are not used."""
    out = x.new_empty(len(x), len(weight))
    for slot, first, position, count in packed.chunks.tolist():
        if count:
            rows = slice(first, first + count)
            out[rows] = _advance(x[rows], state[slot], position, weight)
    return out


def decode(x: Tensor, state: Tensor, slots: Tensor, positions: Tensor, limits: Tensor, weight: Tensor) -> Tensor:
    """See ``rosebatch_kernels.short_conv.kernel.decode``."""
    out = x.new_empty(len(x), len(weight))
    for row, (slot, position, limit) in enumerate(torch.stack((slots, positions, limits), 1).tolist()):
        if position < limit:
            out[row] = _advance(x[row : row + 1], state[slot], position, weight)[0]
    return out


def _advance(x: Tensor, inputs: Tensor, position: int, weight: Tensor) -> Tensor:
    """Successive tokens of one sequence, the first at ``position``; its last inputs replace those in the slot."""
    taps, end = len(inputs), position + len(x)
    before, after, own = x.chunk(3, 1)
    past = range(max(position - taps + 1, 0), position)
    known = torch.cat((inputs[[place % taps for place in past]], before * own))
    missing = taps - 1 - len(past)
    wide = torch.promote_types(x.dtype, torch.float32)
    values = torch.nn.functional.pad(known.to(wide), (0, 0, missing, 0))
    total = torch.zeros(len(x), len(weight), dtype=wide, device=x.device)
    for tap in range(taps):
        total += values[tap : tap + len(x)] * weight[:, tap].to(wide)
    kept = range(max(end - taps, position), end)
    inputs[[place % taps for place in kept]] = known[[place - position + len(past) for place in kept]]
    return after * total.to(x.dtype)
