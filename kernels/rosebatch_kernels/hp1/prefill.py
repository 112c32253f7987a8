"""HP1 prefill attention over the paged cache in Triton: packed chunks of many sequences, each over prefix and itself.

One program serves a tile of successive query tokens of one sequence and one query head. It walks over that
sequence's keys in runs (see ``rosebatch_kernels.hp1.runs``) and applies the gate in registers, between two products on
the tensor cores. There is no maximum, no sum and nothing to rescale.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.tiles import TILE_ROWS, tile_of_program
from rosebatch_kernels.hp1.columns import due_in_front, keys_before, load_keys, nearest, places, two_pages
from rosebatch_kernels.hp1.gate import Gate
from rosebatch_kernels.hp1.runs import gated, load_taps
from rosebatch_kernels.hp1.sizes import SIZES, Sizes


def prefill(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    tiles: Tensor,
    gate: Gate,
    *,
    num_heads: int,
    scale: float,
    sizes: Sizes = SIZES.measured,
) -> Tensor:
    """Attention of chunks of tokens, packed one after the other, see ``rosebatch_kernels.hp1.reference``.

    Args:
        q: ``[T, at least heads · D]``, rows at any stride: q stands first in each.
        cache: ``[2, blocks, kv_heads, block_size, D]``, the chunks' own K and V included.
        block_table: ``[S, M]`` int32 block ids, rows at any stride.
        tiles: ``[N, 4]`` int32: row of the block table, first row in q, position of that row, number of rows (at
            most ``TILE_ROWS``, 0 for padding). The result is undefined in rows of q that no tile covers.
        gate: of the layer.
        num_heads: query heads, a multiple of kv_heads.
        scale: factor on q·k, positive.

    Returns:
        ``[T, heads · D]``.
    """
    _, blocks, kv_heads, block_size, size = cache.shape
    out = torch.empty(len(q), num_heads * size, dtype=q.dtype, device=q.device)
    program = sizes.prefill_fp32 if q.dtype.itemsize == 4 else sizes.prefill
    # Of unscaled scores: the scale is applied to the sums of values, which are fewer.
    clip_min, clip_max = gate.bounds(scale)
    _gated_prefill[(num_heads, len(tiles))](
        out=out,
        q=q,
        cache=cache,
        block_table=block_table,
        tiles=tiles,
        taps=gate.taps,
        gamma=gate.gamma,
        scale=scale,
        num_blocks=blocks,
        q_stride=q.stride(0),
        table_stride=block_table.stride(0),
        HEADS=num_heads,
        KV_HEADS=kv_heads,
        D=size,
        WIDTH=max(16, triton.next_power_of_2(size)),
        BLOCK=block_size,
        ROWS=TILE_ROWS,
        KEYS=program.keys,
        TAPS=gate.taps.shape[1],
        RELU_PRE=gate.relu_pre,
        CLIP_MIN=clip_min,
        CLIP_MAX=clip_max,
        STAGES=program.stages,
        num_warps=program.warps,
        **launch_options(),
    )
    return out


@triton.jit(do_not_specialize=["num_blocks"])
def _gated_prefill(
    out,
    q,
    cache,
    block_table,
    tiles,
    taps,
    gamma,
    scale,
    num_blocks,
    q_stride,
    table_stride,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TAPS: tl.constexpr,
    RELU_PRE: tl.constexpr,
    CLIP_MIN: tl.constexpr,
    CLIP_MAX: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    filter_taps = load_taps(taps, head, TAPS)
    factor = tl.load(gamma + head) * scale
    if PDL:
        wait()
    sequence, first_row, position, count = tile_of_program(tiles)
    if count == 0:
        # Padding: its row of the block table may not exist.
        return
    table = block_table + sequence * table_stride
    page_size: tl.constexpr = BLOCK * D
    stride: tl.constexpr = KV_HEADS * page_size
    v_distance = num_blocks.to(tl.int64) * stride
    keys = cache + head // (HEADS // KV_HEADS) * page_size
    r = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)[None, :]
    rows = (first_row + r).to(tl.int64)[:, None]
    mine = (r < count)[:, None] & (d < D)
    query = tl.load(q + rows * q_stride + head * D + d, mask=mine, other=0.0)
    own = (position + r)[:, None]
    last_key = position + count - 1
    # Keys of a column. All exist, except some of the last column's.
    run = tl.cdiv(last_key + 1, KEYS)
    first = tl.arange(0, KEYS) * run
    before = keys_before(keys, table, first, last_key, d, D, WIDTH, BLOCK, stride, TAPS)
    due = due_in_front(query, before, first, filter_taps, ROWS, KEYS, TAPS, RELU_PRE)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    for piece in range(0, run, BLOCK):
        page, start, page_step = two_pages(table, first + piece, last_key, BLOCK, stride)
        for i in tl.range(piece, tl.minimum(piece + BLOCK, run), num_stages=STAGES):
            n = first + i
            offsets = places(nearest(n, last_key), page, start, page_step, d, D, BLOCK)
            k = load_keys(keys + offsets, d, D, WIDTH)
            v = load_keys(keys + v_distance + offsets, d, D, WIDTH)
            scores = tl.dot(query, tl.trans(k), input_precision="ieee")
            weights, due = gated(scores, due, filter_taps, TAPS, RELU_PRE, CLIP_MIN, CLIP_MAX)
            weights = tl.where(n[None, :] <= own, weights, 0.0)
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    tl.store(out + rows * (HEADS * D) + head * D + d, (acc * factor).to(out.dtype.element_ty), mask=mine)
