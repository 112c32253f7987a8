"""HP1 decode attention over keys that many sequences share, once for all of them, on the tensor cores.

One program serves an item (see ``rosebatch_kernels.common.shared_keys``) and one query head of all its members. It
walks over the shared keys like ``rosebatch_kernels.hp1.prefill`` over a prompt. The partial results simply add up.
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.decode_step import first_line, query_halves
from rosebatch_kernels.common.device import Device
from rosebatch_kernels.common.heads import normed_and_rotated, turn, weight_halves
from rosebatch_kernels.common.kv_tiles import pages_of_own
from rosebatch_kernels.common.launch import launch_options, wait, wait_before_return
from rosebatch_kernels.common.shared_keys import MAX_PARTS, MEMBERS, SharedKeys
from rosebatch_kernels.hp1.columns import attend_columns
from rosebatch_kernels.hp1.gate import Gate
from rosebatch_kernels.hp1.runs import load_taps
from rosebatch_kernels.hp1.sizes import Sizes

_PARTS = tl.constexpr(MAX_PARTS)


def attend_shared(
    tokens: dict[str, Any], sums: Tensor, keys: SharedKeys, gate: Gate, *, scale: float, sizes: Sizes, device: Device
) -> None:
    """Attend to shared keys and leave each row's weighted sums of values.

    Args:
        tokens: of ``token_arguments``.
        sums: for partial results, which ``rosebatch_kernels.hp1.decode`` takes over.
        keys: of the step.
        gate, scale: as it takes them.
        sizes: of programs.
    """
    # Sizes of prefill, which walks over keys in the same way.
    program = sizes.prefill_fp32 if tokens["cache"].dtype.itemsize == 4 else sizes.prefill
    _gated_attend_shared[(tokens["SHAPE"].HEADS, len(keys.items))](
        **tokens,
        items=keys.items,
        members=keys.members,
        taps=gate.taps,
        gamma=gate.gamma,
        sums=sums,
        scale=scale,
        MEMBERS=MEMBERS,
        KEYS=program.keys,
        GATE=gate.form(scale),
        STAGES=program.stages,
        num_warps=program.warps,
        **launch_options(device),
    )


@triton.jit(do_not_specialize=["num_blocks"])
def _gated_attend_shared(
    items,
    members,
    tokens,
    cache,
    block_table,
    taps,
    gamma,
    sums,
    scale,
    num_blocks,
    table_stride,
    SHAPE: tl.constexpr,
    MEMBERS: tl.constexpr,
    KEYS: tl.constexpr,
    GATE: tl.constexpr,
    STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    head = tl.program_id(0)
    # What the host wrote is older than this kernel's predecessor.
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
    position = tl.load(tokens.positions + row * tokens.state_stride)
    real = ((r < count) & (position < tl.load(tokens.limits + row * tokens.state_stride)))[:, None]
    # Rotary tables may have no row for a sequence that has ended.
    turned = turn(tokens.rotary, tl.where(real, position[:, None], 0), SHAPE)
    one = tl.zeros([1, 1], tl.int32)
    tl.static_assert(SHAPE.NORM != "layer", "its weights are those of each head")
    q_weights = weight_halves(tokens.q_norm, one, one == 0, SHAPE)
    filter_taps = load_taps(taps, head, GATE)
    factor = tl.load(gamma + head) * scale
    kv_head = head // SHAPE.GROUP
    pages = pages_of_own(cache, num_blocks, block_table + tl.load(own_members) * table_stride, kv_head, SHAPE)
    if PDL:
        wait()

    q_halves = query_halves(tokens, row[:, None], head, real, SHAPE)
    query = normed_and_rotated(q_halves, q_weights, turned, SHAPE)
    acc = attend_columns(query, pages, begin, last_key, last_key, filter_taps, SHAPE, GATE, KEYS, STAGES)
    line = first_line(row, kv_head, _PARTS, SHAPE) + part * SHAPE.GROUP + head % SHAPE.GROUP
    d = tl.arange(0, SHAPE.WIDTH)[None, :]
    tl.store(sums + line.to(tl.int64)[:, None] * SHAPE.D + d, acc * factor, mask=real & (d < SHAPE.D))
