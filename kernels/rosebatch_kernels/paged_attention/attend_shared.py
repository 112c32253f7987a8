"""Decode attention over keys that many sequences share, once for all of them, on the tensor cores.

One program serves an item (see ``rosebatch_kernels.common.shared_keys``), one K/V head and up to 128 queries: the
members' heads that share it. It reads the shared K and V once for all of these, where the decode kernel would read them
for each row. Norm and rotation of q are those of the decode kernel (source of the idea: Hydragen, arXiv 2402.05099).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.head_norms import HeadNorm, norm_arguments
from rosebatch_kernels.common.heads import halves, normed_and_rotated, turn, weight_halves
from rosebatch_kernels.common.launch import launch_options, wait, wait_before_return
from rosebatch_kernels.common.scores import score_factors
from rosebatch_kernels.common.shared_keys import MAX_PARTS, MEMBERS, QUERIES, SharedKeys, SharedParts
from rosebatch_kernels.paged_attention.online_softmax import attend, keys_of_tile, no_key
from rosebatch_kernels.paged_attention.sizes import SIZES, SharedSizes


def attend_shared(
    qkv: Tensor,
    cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    limits: Tensor,
    keys: SharedKeys,
    parts: SharedParts,
    *,
    num_heads: int,
    scale: float,
    soft_cap: float = 0.0,
    rotary: tuple[Tensor, Tensor] | None = None,
    qk_norm: HeadNorm | None = None,
    append: bool = True,
    sizes: SharedSizes = SIZES.measured.shared,
) -> None:
    """Attend to shared keys and leave each row's partial results in ``parts``.

    Args:
        keys: of the step.
        parts: for partial results, which ``rosebatch_kernels.paged_attention.decode`` takes over.
        qkv, cache, block_table, positions, limits: as it takes them.
        num_heads, scale, soft_cap, rotary, qk_norm, append: as well.
        sizes: of programs.
    """
    _, blocks, kv_heads, block_size, size = cache.shape
    group = num_heads // kv_heads
    program = sizes.narrow if size <= 128 else sizes.large_heads
    max_queries = QUERIES
    if qkv.dtype.itemsize == 4:
        program, max_queries = sizes.fp32, max_queries // 4
    queries = min(max_queries, triton.next_power_of_2(MEMBERS * group))
    cos, sin = rotary if append and rotary is not None else (qkv, qkv)
    scale, cap = score_factors(scale, soft_cap)
    norm, q_weight, _, q_number, _ = norm_arguments(qk_norm if append else None, qkv)
    _attend_shared[(kv_heads, len(keys.items), triton.cdiv(MEMBERS * group, queries))](
        items=keys.items,
        members=keys.members,
        qkv=qkv,
        cache=cache,
        block_table=block_table,
        positions=positions,
        limits=limits,
        cos=cos,
        sin=sin,
        q_weight=q_weight,
        sums=parts.sums,
        stats=parts.stats,
        scale=scale,
        q_number=q_number,
        num_blocks=blocks,
        qkv_stride=qkv.stride(0),
        table_stride=block_table.stride(0),
        state_stride=positions.stride(0),
        cap=cap,
        KV_HEADS=kv_heads,
        GROUP=group,
        QUERIES=queries,
        D=size,
        WIDTH=max(16, triton.next_power_of_2(size)),
        BLOCK=block_size,
        TILE=program.keys,
        PARTS=MAX_PARTS,
        ROTARY=cos.shape[1] if append and rotary is not None else 0,
        NORM=norm,
        CAPPED=soft_cap > 0,
        STAGES=program.stages,
        num_warps=program.warps,
        maxnreg=program.registers,
        **launch_options(),
    )


@triton.jit(do_not_specialize=["num_blocks"])
def _attend_shared(
    items,
    members,
    qkv,
    cache,
    block_table,
    positions,
    limits,
    cos,
    sin,
    q_weight,
    sums,
    stats,
    scale,
    q_number,
    num_blocks,
    qkv_stride,
    table_stride,
    state_stride,
    cap,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    PARTS: tl.constexpr,
    ROTARY: tl.constexpr,
    NORM: tl.constexpr,
    CAPPED: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    # What the host wrote is older than the kernel in front.
    item = items + tl.program_id(1) * 5
    count = tl.load(item + 1)
    first_query = tl.program_id(2) * QUERIES
    if first_query >= count * GROUP:
        wait_before_return((tl.program_id(1) == 0) & (first_query == 0), PDL)
        return
    group_members = members + tl.load(item)
    first = tl.load(item + 2)
    end = tl.load(item + 3)
    part = tl.load(item + 4)
    r = first_query + tl.arange(0, QUERIES)
    g = r % GROUP
    row = tl.load(group_members + tl.minimum(r // GROUP, count - 1))
    position = tl.load(positions + row * state_stride)
    real = (r < count * GROUP) & (position < tl.load(limits + row * state_stride))
    # Rotary tables may have no row for a sequence that has ended.
    position = tl.where(real, position, 0)
    table_row = block_table + tl.load(group_members) * table_stride
    last_block = (end - 1) // BLOCK
    first_tile = first // TILE
    block = tl.load(table_row + (first_tile * TILE) // BLOCK)
    turned = turn(cos, sin, position[:, None], WIDTH, ROTARY)
    own_head = (head * GROUP + g)[:, None]
    q_weights = weight_halves(q_weight, q_number, own_head, real[:, None], D, WIDTH, ROTARY, NORM)
    if PDL:
        wait()

    q_halves = halves(qkv + row.to(tl.int64)[:, None] * qkv_stride + own_head * D, real[:, None], D, WIDTH, ROTARY)
    q = normed_and_rotated(q_halves, q_weights, turned, D, ROTARY, NORM)
    v_distance = num_blocks.to(tl.int64) * KV_HEADS * (BLOCK * D)
    offset = tl.arange(0, TILE)
    row_max, total, acc = no_key(QUERIES, WIDTH)
    for tile in tl.range(first_tile, tl.cdiv(end, TILE), num_stages=STAGES):
        n = tile * TILE + offset
        k, v, block = keys_of_tile(
            cache, table_row, block, last_block, tile, n, first, end, v_distance, head, KV_HEADS, D, WIDTH, BLOCK, TILE
        )
        row_max, total, acc = attend(
            q, k, v, (n < end) & (n >= first), row_max, total, acc, scale, cap, QUERIES, CAPPED
        )
    line = ((row * KV_HEADS + head) * PARTS + part) * GROUP + g
    d = tl.arange(0, WIDTH)[None, :]
    tl.store(sums + line.to(tl.int64)[:, None] * D + d, acc, mask=real[:, None] & (d < D))
    tl.store(stats + line * 2, row_max, mask=real)
    tl.store(stats + line * 2 + 1, total, mask=real)
