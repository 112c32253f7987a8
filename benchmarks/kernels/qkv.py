"""Bandwidth of QK norm, rotation and append in one kernel: ``python -m benchmarks.kernels.qkv``.

The reference is not timed: it picks out the real tokens and so waits for the device, and no graph can hold it.
The first lines have article S4's comparison: HP1's clips of q and k by a kernel for each, and by ``prepare``, which
also appends K and V.
"""

from functools import partial

import torch
from torch import Tensor

from benchmarks.kernels.inputs import BLOCK_SIZE, HEADS, HP1, Heads, block_table, head_norm, randn
from benchmarks.kernels.launchers import Launchers
from benchmarks.kernels.table import bench
from rosebatch_kernels.common.head_norms import HeadUClip

_QKV, _UCLIP = Launchers("qkv.kernel"), Launchers("uclip.kernel")
# Sequences, and tokens of each: decode steps, and prefills.
_SIZES = ((32, 1), (256, 1), (16, 512), (16, 1024))
# Tokens in article S4's table of the norms of q and k.
_TOKENS = (1, 32, 128, 512, 2048)
_TURNS = 8


def main() -> None:
    """Write one line for each model and number of tokens."""
    for tokens in _TOKENS:
        _qk_norm(tokens)
    for model, shape in HEADS.items():
        if shape.window:
            # The same work as without.
            continue
        for sequences, length in _SIZES:
            _prepare(model, sequences, length)


def _qk_norm(tokens: int) -> None:
    """One new token of each sequence."""
    heads, kv_heads, size, *_ = HP1
    alphas = randn(size), randn(size)
    numbers = torch.arange(tokens, dtype=torch.int32, device="cuda")
    fused = partial(
        _QKV.prepare,
        block_table=numbers.view(tokens, 1),
        rows=numbers,
        positions=torch.zeros_like(numbers),
        num_heads=heads,
        qk_norm=HeadUClip(*alphas, 1.0, 1.0),
    )

    def apart(qkv: Tensor, _: Tensor) -> None:
        q, k, _ = qkv.view(tokens, -1, size).split((heads, kv_heads, kv_heads), dim=1)
        _UCLIP.uclip_norm(q, alphas[0], 1.0)
        _UCLIP.uclip_norm(k, alphas[1], 1.0)

    inputs = _inputs(HP1, tokens, blocks=tokens)
    clipped = 2 * 2 * tokens * (heads + kv_heads) * size
    # Of v: read and written.
    appended = 2 * 2 * tokens * kv_heads * size
    name = f"QK clip  N={tokens} {heads}+{kv_heads} heads of {size}"
    bench(f"{name}  two kernels", apart, inputs, moved=clipped)
    bench(f"{name}  one kernel, with append", fused, inputs, moved=clipped + appended)


def _prepare(model: str, sequences: int, length: int) -> None:
    shape, tokens, table = HEADS[model], sequences * length, block_table(sequences, length)
    heads, kv_heads, size, rotary, qk_norm, *_ = shape
    step = partial(
        _QKV.prepare,
        block_table=table,
        rows=torch.arange(sequences, dtype=torch.int32, device="cuda").repeat_interleave(length),
        positions=torch.arange(length, dtype=torch.int32, device="cuda").repeat(sequences),
        num_heads=heads,
        rotary=_rotation(length, rotary) if rotary else None,
        qk_norm=head_norm(shape),
    )
    # K and V are read and written, and q if it is normalised or rotated; 16-bit numbers.
    numbers = tokens * size * (4 * kv_heads + (2 * heads if rotary or qk_norm else 0))
    name = f"{'prepare':<8} {model:<17} T={tokens} {heads}+2x{kv_heads} heads of {size}"
    bench(name, step, _inputs(shape, tokens, table.numel()), moved=2 * numbers)


def _inputs(shape: Heads, tokens: int, blocks: int) -> list[tuple[Tensor, Tensor]]:
    """Projections that take turns, and the cache of all of them."""
    cache = randn(2, blocks, shape.kv_heads, BLOCK_SIZE, shape.size)
    return [(randn(tokens, (shape.heads + 2 * shape.kv_heads) * shape.size), cache) for _ in range(_TURNS)]


def _rotation(length: int, size: int) -> tuple[Tensor, Tensor]:
    """Real rotations: every call rotates q again, and q must not grow."""
    angles = torch.rand(length, size // 2, device="cuda") * 6.28
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


if __name__ == "__main__":
    main()
