"""HP1 decode attention over keys that many sequences share, once for all of them, on the tensor cores.

One program serves an item (see ``rosebatch_kernels.common.shared_keys``) and one query head of all its members. It
walks over the shared keys like ``rosebatch_kernels.hp1.prefill`` over a prompt. The partial results simply add up.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.head_norms import HeadNorm, norm_arguments
from rosebatch_kernels.common.heads import halves, normed_and_rotated, turn, weight_halves
from rosebatch_kernels.common.launch import launch_options, wait, wait_before_return
from rosebatch_kernels.common.shared_keys import MAX_PARTS, MEMBERS, SharedKeys, SharedParts
from rosebatch_kernels.hp1.columns import due_in_front, keys_before, load_keys, nearest, places, two_pages
from rosebatch_kernels.hp1.gate import Gate
from rosebatch_kernels.hp1.runs import gated, load_taps
from rosebatch_kernels.hp1.sizes import SIZES, Sizes


def attend_shared(
    qkv: Tensor,
    cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    limits: Tensor,
    keys: SharedKeys,
    parts: SharedParts,
    gate: Gate,
    *,
    num_heads: int,
    scale: float,
    rotary: tuple[Tensor, Tensor] | None = None,
    qk_norm: HeadNorm | None = None,
    append: bool = True,
    sizes: Sizes = SIZES.measured,
) -> None:
    """Attend to shared keys and leave each row's weighted sums of values in ``parts``.

    Args:
        keys: of the step.
        parts: for partial results, which ``rosebatch_kernels.hp1.decode`` takes over.
        qkv, cache, block_table, positions, limits, gate: as it takes them.
        num_heads, scale, rotary, qk_norm, append: as well.
    """
    _, blocks, kv_heads, block_size, size = cache.shape
    # Sizes of prefill, which walks over keys in the same way.
    program = sizes.prefill_fp32 if qkv.dtype.itemsize == 4 else sizes.prefill
    cos, sin = rotary if append and rotary is not None else (qkv, qkv)
    norm, q_weight, _, q_number, _ = norm_arguments(qk_norm if append else None, qkv)
    clip_min, clip_max = gate.bounds(scale)
    _gated_attend_shared[(num_heads, len(keys.items))](
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
        taps=gate.taps,
        gamma=gate.gamma,
        sums=parts.sums,
        scale=scale,
        q_number=q_number,
        num_blocks=blocks,
        qkv_stride=qkv.stride(0),
        table_stride=block_table.stride(0),
        state_stride=positions.stride(0),
        KV_HEADS=kv_heads,
        GROUP=num_heads // kv_heads,
        MEMBERS=MEMBERS,
        D=size,
        WIDTH=max(16, triton.next_power_of_2(size)),
        BLOCK=block_size,
        KEYS=program.keys,
        PARTS=MAX_PARTS,
        ROTARY=cos.shape[1] if append and rotary is not None else 0,
        NORM=norm,
        TAPS=gate.taps.shape[1],
        RELU_PRE=gate.relu_pre,
        CLIP_MIN=clip_min,
        CLIP_MAX=clip_max,
        STAGES=program.stages,
        num_warps=program.warps,
        **launch_options(),
    )


@triton.jit(do_not_specialize=["num_blocks"])
def _gated_attend_shared(
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
    taps,
    gamma,
    sums,
    scale,
    q_number,
    num_blocks,
    qkv_stride,
    table_stride,
    state_stride,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    MEMBERS: tl.constexpr,
    D: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    KEYS: tl.constexpr,
    PARTS: tl.constexpr,
    ROTARY: tl.constexpr,
    NORM: tl.constexpr,
    TAPS: tl.constexpr,
    RELU_PRE: tl.constexpr,
    CLIP_MIN: tl.constexpr,
    CLIP_MAX: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    # What the host wrote is older than the kernel in front.
    item = items + tl.program_id(1) * 5
    count = tl.load(item + 1)
    if count == 0:
        wait_before_return(tl.program_id(1) == 0, PDL)
        return
    own_members = members + tl.load(item)
    begin = tl.load(item + 2)
    last_key = tl.load(item + 3) - 1
    part = tl.load(item + 4)
    r = tl.arange(0, MEMBERS)
    row = tl.load(own_members + tl.minimum(r, count - 1))
    position = tl.load(positions + row * state_stride)
    real = ((r < count) & (position < tl.load(limits + row * state_stride)))[:, None]
    # Rotary tables may have no row for a sequence that has ended.
    turned = turn(cos, sin, tl.where(real, position[:, None], 0), WIDTH, ROTARY)
    one = tl.zeros([1, 1], tl.int32)
    tl.static_assert(NORM != "layer", "its weights are those of each head")
    q_weights = weight_halves(q_weight, q_number, one, one == 0, D, WIDTH, ROTARY, NORM)
    filter_taps = load_taps(taps, head, TAPS)
    factor = tl.load(gamma + head) * scale
    table = block_table + tl.load(own_members) * table_stride
    page_size: tl.constexpr = BLOCK * D
    stride: tl.constexpr = KV_HEADS * page_size
    v_distance = num_blocks.to(tl.int64) * stride
    keys = cache + head // GROUP * page_size
    d = tl.arange(0, WIDTH)[None, :]
    if PDL:
        wait()

    q_halves = halves(qkv + row.to(tl.int64)[:, None] * qkv_stride + head * D, real, D, WIDTH, ROTARY)
    query = normed_and_rotated(q_halves, q_weights, turned, D, ROTARY, NORM)
    # Keys of a column. All exist, except some of the last column's.
    run = tl.cdiv(last_key + 1 - begin, KEYS)
    first = begin + tl.arange(0, KEYS) * run
    before = keys_before(keys, table, first, last_key, d, D, WIDTH, BLOCK, stride, TAPS)
    due = due_in_front(query, before, first, filter_taps, MEMBERS, KEYS, TAPS, RELU_PRE)
    acc = tl.zeros([MEMBERS, WIDTH], tl.float32)
    for piece in range(0, run, BLOCK):
        page, start, page_step = two_pages(table, first + piece, last_key, BLOCK, stride)
        for i in tl.range(piece, tl.minimum(piece + BLOCK, run), num_stages=STAGES):
            n = first + i
            offsets = places(nearest(n, last_key), page, start, page_step, d, D, BLOCK)
            k = load_keys(keys + offsets, d, D, WIDTH)
            v = load_keys(keys + v_distance + offsets, d, D, WIDTH)
            scores = tl.dot(query, tl.trans(k), input_precision="ieee")
            weights, due = gated(scores, due, filter_taps, TAPS, RELU_PRE, CLIP_MIN, CLIP_MAX)
            weights = tl.where((n <= last_key)[None, :], weights, 0.0)
            acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
    line = ((row * KV_HEADS + head // GROUP) * PARTS + part) * GROUP + head % GROUP
    tl.store(sums + line.to(tl.int64)[:, None] * D + d, acc * factor, mask=real & (d < D))
