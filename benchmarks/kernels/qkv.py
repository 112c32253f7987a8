"""Bandwidth of QK norm, rotation and append in one kernel: ``python -m benchmarks.kernels.qkv``.

The reference is not timed: it picks out the real tokens and so waits for the device, and no graph can hold it.
The first lines have article S4's comparison: HP1's clips of q and k by a kernel for each, and by ``prepare``, which
also appends K and V.
"""

from functools import partial
from itertools import cycle

import torch
from torch import Tensor

from benchmarks.kernels.inputs import HEADS, randn
from benchmarks.kernels.launchers import Launchers
from benchmarks.kernels.table import report
from rosebatch_kernels.common.head_norms import HeadRMSNorm, HeadUClip
from rosebatch_kernels.common.timing import median_us

_QKV, _UCLIP = Launchers("qkv.kernel"), Launchers("uclip.kernel")
# Sequences, and tokens of each: decode steps, and prefills.
_SIZES = ((32, 1), (256, 1), (16, 512), (16, 1024))
# Tokens in article S4's table of the norms of q and k, and HP1's heads, K/V heads and head size.
_TOKENS = (1, 32, 128, 512, 2048)
_HP1 = (8, 4, 128)
_BLOCK_SIZE = 64
_TURNS = 8


def main() -> None:
    """Write one line for each model and number of tokens."""
    for tokens in _TOKENS:
        _qk_norm(tokens, *_HP1)
    for model, shape in HEADS.items():
        if shape.window:
            # The same work as without.
            continue
        for sequences, length in _SIZES:
            _prepare(model, sequences, length)


def _qk_norm(tokens: int, heads: int, kv_heads: int, size: int) -> None:
    """One new token of each sequence."""
    alphas = randn(size), randn(size)
    projections = [randn(tokens, (heads + 2 * kv_heads) * size) for _ in range(_TURNS)]
    cache = randn(2, tokens, kv_heads, _BLOCK_SIZE, size)
    numbers = torch.arange(tokens, dtype=torch.int32, device="cuda")
    step = partial(
        _QKV.prepare,
        block_table=numbers.view(tokens, 1),
        rows=numbers,
        positions=torch.zeros_like(numbers),
        num_heads=heads,
        qk_norm=HeadUClip(*alphas, 1.0, 1.0),
    )

    def apart(qkv: Tensor) -> None:
        q, k, _ = qkv.view(tokens, -1, size).split((heads, kv_heads, kv_heads), dim=1)
        _UCLIP.uclip_norm(q, alphas[0], 1.0)
        _UCLIP.uclip_norm(k, alphas[1], 1.0)

    def fused(qkv: Tensor) -> None:
        step(qkv, cache)

    clipped = 2 * 2 * tokens * (heads + kv_heads) * size
    # Of v: read and written.
    appended = 2 * 2 * tokens * kv_heads * size
    for name, run, moved in (("two kernels", apart, clipped), ("one kernel, with append", fused, clipped + appended)):
        turns = cycle(projections)
        microseconds = median_us(lambda run=run, turns=turns: run(next(turns)))  # type: ignore[misc]
        report(f"QK clip  N={tokens} {heads}+{kv_heads} heads of {size}  {name}", microseconds, moved=moved)


def _prepare(model: str, sequences: int, length: int) -> None:
    heads, kv_heads, size, rotary, qk_norm, *_ = HEADS[model]
    tokens, width = sequences * length, -(-length // _BLOCK_SIZE)
    blocks = sequences * width
    step = partial(
        _QKV.prepare,
        block_table=torch.randperm(blocks, device="cuda").int().view(sequences, width),
        rows=torch.arange(sequences, dtype=torch.int32, device="cuda").repeat_interleave(length),
        positions=torch.arange(length, dtype=torch.int32, device="cuda").repeat(sequences),
        num_heads=heads,
        rotary=_rotation(length, rotary) if rotary else None,
        qk_norm=HeadRMSNorm(randn(size), randn(size), 1e-6) if qk_norm else None,
    )
    projections = [randn(tokens, (heads + 2 * kv_heads) * size) for _ in range(_TURNS)]
    cache = randn(2, blocks, kv_heads, _BLOCK_SIZE, size)
    turns = cycle(projections)
    microseconds = median_us(lambda: step(next(turns), cache))
    # K and V are read and written, and q if it is normalised or rotated; 16-bit numbers.
    numbers = tokens * size * (4 * kv_heads + (2 * heads if rotary or qk_norm else 0))
    report(
        f"{'prepare':<8} {model:<17} T={tokens} {heads}+2x{kv_heads} heads of {size}", microseconds, moved=2 * numbers
    )


def _rotation(length: int, size: int) -> tuple[Tensor, Tensor]:
    """Real rotations: every call rotates q again, and q must not grow."""
    angles = torch.rand(length, size // 2, device="cuda") * 6.28
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


if __name__ == "__main__":
    main()
