"""HP1 prefill attention over the paged cache in Triton: packed chunks of many sequences, each over prefix and itself.

One program serves a tile of successive query tokens of one sequence and one query head. It walks over that sequence's
keys in runs, see ``rosebatch_kernels.hp1.runs``. It applies the gate in registers, between two products on the tensor
cores. There is no maximum, no sum and nothing to rescale.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.kv_tiles import pages_of_own
from rosebatch_kernels.common.launch import launch_options, wait
from rosebatch_kernels.common.tiles import (
    load_queries,
    prefill_arguments,
    rows_of_tile,
    store_result,
    tile_of_program,
)
from rosebatch_kernels.hp1.columns import attend_columns
from rosebatch_kernels.hp1.gate import Gate
from rosebatch_kernels.hp1.runs import load_taps
from rosebatch_kernels.hp1.sizes import Sizes


def prefill(
    q: Tensor,
    cache: Tensor,
    block_table: Tensor,
    tiles: Tensor,
    gate: Gate,
    *,
    num_heads: int,
    scale: float,
    sizes: Sizes,
    device: Device,
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
    out, arguments = prefill_arguments(q, cache, block_table, tiles, num_heads=num_heads)
    program = sizes.prefill_fp32 if q.dtype.itemsize == 4 else sizes.prefill
    _gated_prefill[(num_heads, len(tiles))](
        **arguments,
        taps=gate.taps,
        gamma=gate.gamma,
        scale=scale,
        KEYS=program.keys,
        GATE=gate.form(scale),
        STAGES=program.stages,
        num_warps=program.warps,
        **launch_options(device),
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
    SHAPE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    GATE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    filter_taps = load_taps(taps, head, GATE)
    factor = tl.load(gamma + head) * scale
    if PDL:
        wait()
    sequence, first_row, position, count = tile_of_program(tiles)
    if count == 0:
        # Padding: its row of the block table may not exist.
        return
    pages = pages_of_own(cache, num_blocks, block_table + sequence * table_stride, head // SHAPE.GROUP, SHAPE)
    rows, mine = rows_of_tile(first_row, count, ROWS, SHAPE)
    query = load_queries(q, q_stride, head, rows, mine, SHAPE)
    own = (position + tl.arange(0, ROWS))[:, None]
    acc = attend_columns(query, pages, 0, position + count - 1, own, filter_taps, SHAPE, GATE, KEYS, STAGES)
    store_result(out, head, rows, mine, acc * factor, SHAPE)
