"""Latents in blocks: the constants of a layer, and sums over tiles of them, which are keys and values at once."""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.dot import dot
from rosebatch_kernels.common.whole_numbers import next_power_of_2


class Widths(NamedTuple):
    """Constants of a layer: its heads, the parts of a row and what tiles of them have, and the tokens of a block."""

    HEADS: int
    RANK: int
    ROTATED: int
    RANK_WIDTH: int
    ROTATED_WIDTH: int
    BLOCK: int


def widths(heads: int, cache: Tensor, rank: int) -> Widths:
    """Constants of a layer with so many heads."""
    rotated = cache.shape[-1] - rank
    # A matrix product takes 16 channels at least.
    tiles = max(16, next_power_of_2(rank)), max(16, next_power_of_2(rotated))
    return Widths(heads, rank, rotated, *tiles, cache.shape[3])


@triton.jit
def attend_latents(
    queries,
    cache,
    table,
    start,
    stop,
    last,
    scale,
    SHAPE: tl.constexpr,
    KEYS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Sums over the keys from ``start`` to before ``stop``, of which rows see those up to ``last [ROWS]``.

    Each row sees the first of them.

    Returns:
        The largest score, the sum of weights ``[ROWS]``, and that of weighted latents ``[ROWS, RANK_WIDTH]``.
    """
    q, q_rotated = queries
    n = tl.arange(0, SHAPE.RANK_WIDTH)[None, :]
    d = tl.arange(0, SHAPE.ROTATED_WIDTH)[None, :]
    row_max = tl.full([q.shape[0]], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0]], tl.float32)
    width: tl.constexpr = SHAPE.RANK_WIDTH
    size: tl.constexpr = SHAPE.RANK + SHAPE.ROTATED
    acc = tl.zeros([q.shape[0], width], tl.float32)
    block = tl.load(table + start // SHAPE.BLOCK)
    for first in tl.range(start, stop, KEYS, num_stages=STAGES):
        key = first + tl.arange(0, KEYS)
        # A product of each: Triton takes a sum of blocks and keys to be a multiple of a block's tokens.
        if SHAPE.BLOCK % KEYS == 0:
            row = cache + block.to(tl.int64) * (SHAPE.BLOCK * size) + (key % SHAPE.BLOCK * size)[:, None]
            # Loaded with its keys, the number would be a link of their pipeline, which would wait for each tile.
            block = tl.load(table + tl.minimum(first + KEYS, stop - 1) // SHAPE.BLOCK)
        else:
            blocks = tl.load(table + key // SHAPE.BLOCK, mask=key < stop, other=0).to(tl.int64)
            row = cache + (blocks * (SHAPE.BLOCK * size) + key % SHAPE.BLOCK * size)[:, None]
        there = (key < stop)[:, None]
        latents = tl.load(row + n, mask=there & (n < SHAPE.RANK), other=0.0)
        rotated = tl.load(row + SHAPE.RANK + d, mask=there & (d < SHAPE.ROTATED), other=0.0)
        scores = dot(q_rotated, tl.trans(rotated), dot(q, tl.trans(latents))) * scale
        scores = tl.where(key[None, :] <= last[:, None], scores, float("-inf"))
        higher = tl.maximum(row_max, tl.max(scores, 1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(row_max - higher)
        total = total * shrink + tl.sum(weights, 1)
        acc = dot(weights.to(latents.dtype), latents, acc * shrink[:, None])
        row_max = higher
    return row_max, total, acc
