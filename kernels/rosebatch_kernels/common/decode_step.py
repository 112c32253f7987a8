"""What all kinds of decode attention have in common: one new token for each sequence, whose K and V may be appended.

The kernels read the rows of the fused QKV projection themselves. QK norm, rotary positions and the KV append happen in
registers. So a layer needs no kernel between the projection and the attention (source of the append inside the kernel:
article S0).
"""

# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rosebatch_kernels.common.head_norms import HeadNorm, NormArguments, norm_arguments
from rosebatch_kernels.common.heads import Rotary, halves, shape_of
from rosebatch_kernels.common.shared_keys import SharedKeys
from rosebatch_kernels.common.splits import DecodeWorkspace


class Tokens(NamedTuple):
    """The new tokens, as kernels take them.

    Attributes:
        qkv: ``[B, (heads + 2 · kv_heads) · D]``, q then k then v, the projection's output.
        positions, limits: ``[B]`` int32.
        rotary: cos and sin.
        q_norm, k_norm: before the rotation.
        qkv_stride, state_stride: from row to row of ``qkv``, and of both ``positions`` and ``limits``.
    """

    qkv: Tensor
    positions: Tensor
    limits: Tensor
    rotary: Rotary | None
    q_norm: NormArguments | None
    k_norm: NormArguments | None
    qkv_stride: int
    state_stride: int


class Partials(NamedTuple):
    """Memory for the results of splits, see ``DecodeWorkspace``."""

    sums: Tensor
    stats: Tensor
    arrived: Tensor


class SharedPartials(NamedTuple):
    """Results of keys that rows share, see ``SharedKeys`` and ``SharedParts``."""

    begins: Tensor
    counts: Tensor
    sums: Tensor
    stats: Tensor


def token_arguments(
    qkv: Tensor,
    cache: Tensor,
    block_table: Tensor,
    positions: Tensor,
    limits: Tensor,
    *,
    num_heads: int,
    rotary: Rotary | None,
    qk_norm: HeadNorm | None,
    append: bool,
) -> dict[str, Any]:
    """Arguments of a kernel that reads the new tokens' q and cached keys. Without ``append``, q is ready."""
    if not append:
        rotary = qk_norm = None
    norm, q_norm, k_norm = norm_arguments(qk_norm)
    return {
        "tokens": Tokens(qkv, positions, limits, rotary, q_norm, k_norm, qkv.stride(0), positions.stride(0)),
        "cache": cache,
        "block_table": block_table,
        "num_blocks": cache.shape[1],
        "table_stride": block_table.stride(0),
        "SHAPE": shape_of(cache, num_heads, rotary, norm),
    }


def result_arguments(
    qkv: Tensor, cache: Tensor, workspace: DecodeWorkspace, keys: SharedKeys | None, *, num_heads: int
) -> tuple[Tensor, dict[str, Any]]:
    """The result, and arguments of a kernel that computes it: the new tokens' attention."""
    out = torch.empty(len(qkv), num_heads * cache.shape[-1], dtype=qkv.dtype, device=qkv.device)
    shared = None
    if keys is not None:
        assert workspace.shared is not None, "there is memory for what rows share"
        shared = SharedPartials(keys.begins, keys.counts, workspace.shared.sums, workspace.shared.stats)
    partials = Partials(workspace.sums, workspace.stats, workspace.arrived)
    return out, {"out": out, "partials": partials, "shared": shared}


@triton.jit
def query_halves(tokens, row, heads, real, SHAPE: tl.constexpr):
    """Halves of q of query heads ``heads [R, 1]`` that are ``real``, of one row or of rows ``[R, 1]``."""
    return halves(tokens.qkv + row.to(tl.int64) * tokens.qkv_stride + heads * SHAPE.D, real, SHAPE)


@triton.jit
def new_key(tokens, row, head, SHAPE: tl.constexpr):
    """Halves of the new k of a K/V head, and its new v ``[1, WIDTH]``."""
    one = tl.zeros([1, 1], tl.int32)
    d = tl.arange(0, SHAPE.WIDTH)[None, :]
    qkv = tokens.qkv + row.to(tl.int64) * tokens.qkv_stride
    k = halves(qkv + (SHAPE.HEADS + head) * SHAPE.D + one, one == 0, SHAPE)
    return k, tl.load(qkv + (SHAPE.HEADS + SHAPE.KV_HEADS + head) * SHAPE.D + d, mask=d < SHAPE.D, other=0.0)


@triton.jit
def first_line(row, head, PARTS: tl.constexpr, SHAPE: tl.constexpr):
    """The line of the first result of a row's group. Each part has one for each of the group's heads."""
    return (row * SHAPE.KV_HEADS + head) * PARTS * SHAPE.GROUP


@triton.jit
def is_last(partials, row, head, used, SHAPE: tl.constexpr):
    """Count this split's arrival: whether it is the last of ``used``, all of whose stores are visible to it then."""
    tl.debug_barrier()
    counter = partials.arrived + row * SHAPE.KV_HEADS + head
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == used - 1
    if last:
        # The next launch counts from 0.
        tl.store(counter, 0)
    return last
