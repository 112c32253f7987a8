"""Bandwidth of QK norm, rotation and append in one kernel: ``python -m rosebatch_kernels.qkv.bench``.

The reference is not timed: it picks out the real tokens and so waits for the device, and no graph can hold it.
"""

from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from rosebatch_kernels.common.bench_inputs import HEADS, randn
from rosebatch_kernels.common.timing import median_us, report
from rosebatch_kernels.qkv.kernel import prepare

# Sequences, and tokens of each: decode steps, and prefills.
_SIZES = ((32, 1), (256, 1), (16, 512), (16, 1024))
_BLOCK_SIZE = 64
_TURNS = 8


def main() -> None:
    """Write one line for each model and number of tokens."""
    for model in HEADS:
        for sequences, length in _SIZES:
            _prepare(model, sequences, length)


def _prepare(model: str, sequences: int, length: int) -> None:
    heads, kv_heads, size, rotary, qk_norm = HEADS[model]
    tokens, width = sequences * length, -(-length // _BLOCK_SIZE)
    blocks = sequences * width
    step = partial(
        prepare,
        block_table=torch.randperm(blocks, device="cuda").int().view(sequences, width),
        rows=torch.arange(sequences, dtype=torch.int32, device="cuda").repeat_interleave(length),
        positions=torch.arange(length, dtype=torch.int32, device="cuda").repeat(sequences),
        num_heads=heads,
        rotary=_rotation(length, size) if rotary else None,
        qk_norm=(randn(size), randn(size), 1e-6) if qk_norm else None,
    )
    projections = [randn(tokens, (heads + 2 * kv_heads) * size) for _ in range(_TURNS)]
    cache = randn(2, blocks, kv_heads, _BLOCK_SIZE, size)
    turns = cycle(projections)
    microseconds = median_us(lambda: step(next(turns), cache))
    # K and V are read and written, and q if it is normalised or rotated; 16-bit numbers.
    numbers = tokens * size * (4 * kv_heads + (2 * heads if rotary or qk_norm else 0))
    report(
        f"{'prepare':<8} {model:<13} T={tokens} {heads}+2x{kv_heads} heads of {size}", microseconds, moved=2 * numbers
    )


def _rotation(length: int, size: int) -> tuple[Tensor, Tensor]:
    """Real rotations: every call rotates q again, and q must not grow."""
    angles = torch.rand(length, size // 2, device="cuda") * 6.28
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


if __name__ == "__main__":
    main()
