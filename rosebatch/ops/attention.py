"""The kernels of attention with a softmax, and those that other kinds of attention share with it."""

import sys
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from rosebatch.config.switches import Switches
from rosebatch.ops.ops import HeadLayerNorm, HeadNorm, Heads, HeadUClip, QKNorm, WholeRMSNorm
from rosebatch_kernels.common.device import device_of
from rosebatch_kernels.common.sizes import sized
from rosebatch_kernels.paged_attention import torch_gathered as gathered
from rosebatch_kernels.qkv import torch_heads as qkv

__all__ = ["QKVKernels", "SoftmaxKernels", "gathered", "qkv_kernels", "softmax_kernels", "with_workspaces"]


@dataclass(frozen=True, slots=True)
class QKVKernels:
    """What norms, rotates and appends before the attention kernels of the Triton runner.

    Attributes:
        decode_appends: whether decode kernels write the new K and V to the cache.
        decode_rotates: whether they also norm and rotate q and k; only if they append.
        prepare: norms, rotates and appends in one; None to do so by the operators of ``Ops``.
        norms_apart: whether neither ``prepare`` nor an operator of ``Ops`` applies this norm.
        norm_heads: applies it before those: takes a projection, query heads, K/V heads and the norm, and returns the
            projection, the same or a new one.
    """

    decode_appends: bool
    decode_rotates: bool
    prepare: Callable[..., None] | None
    norms_apart: Callable[[QKNorm], bool]
    norm_heads: Callable[[Tensor, int, int, QKNorm], Tensor]


def qkv_kernels(switches: Switches) -> QKVKernels:
    """The kernels of a run."""
    from rosebatch_kernels.norm import kernel as norm_kernel
    from rosebatch_kernels.qkv import kernel as qkv_kernel
    from rosebatch_kernels.uclip import kernel as uclip_kernel

    device = device_of(torch.device("cuda"))
    norms = (
        partial(qkv_kernel.whole_rms_norm_, device=device),
        sized(norm_kernel, "rms_norm", device),
        sized(uclip_kernel, "uclip_norm", device),
    )

    def norms_apart(norm: QKNorm) -> bool:
        """``prepare`` norms each head by itself. Without it, the operator that splits heads applies every norm."""
        return switches.fused_rotary and not (switches.fused_qk_norm and isinstance(norm, HeadNorm))

    return QKVKernels(
        decode_appends=switches.fused_kv_append,
        decode_rotates=switches.fused_kv_append and switches.fused_rotary,
        prepare=partial(qkv_kernel.prepare, device=device) if switches.fused_rotary else None,
        norms_apart=norms_apart,
        norm_heads=partial(_norm_heads, *norms),
    )


@dataclass(frozen=True, slots=True)
class SoftmaxKernels:
    """Attention with a softmax in the Triton runner; each kernel documents shapes and dtypes.

    Attributes:
        prefill_shared: if chunks share tiles.
        undivided_keys: maximum keys of a row, by batch size, that ``decode`` never divides.
        decode_form: what batch size, and whether rows are divided, change in the compiled ``decode``.
    """

    decode: Callable[..., Tensor]
    prefill: Callable[..., Tensor]
    prefill_shared: Callable[..., Tensor]
    undivided_keys: Callable[[int], int]
    decode_form: Callable[..., Hashable]


def softmax_kernels(
    max_num_seqs: int,
    heads: Collection[Heads],
    stored: Collection[bool],
    switches: Switches,
    dtype: torch.dtype,
    device: torch.device,
) -> SoftmaxKernels:
    """The kernels for layers with these heads, with the memory that they keep between calls.

    Args:
        max_num_seqs: most sequences of a step.
        heads: of the layers.
        stored: whether K and V are stored as e4m3: both where layers differ.
        switches: of the run.
        dtype: of K and V.
        device: of the run.
    """
    from rosebatch_kernels.paged_attention import decode, prefill, prefill_shared
    from rosebatch_kernels.paged_attention import sizes as module

    record = device_of(device)
    sizes = module.SIZES.of(record)
    if switches.batch_invariant:
        sizes = sizes.invariant()
    if not switches.hopper_prefill:
        sizes = replace(sizes, prefill=replace(sizes.prefill, hopper=()))

    def undivided_keys(batch: int) -> int:
        if not switches.split_keys:
            return sys.maxsize
        return min(
            module.undivided_keys(batch, *each, dtype, e4m3=e4m3, sizes=sizes) for each, e4m3 in product(heads, stored)
        )

    def decode_form(batch: int, *, divided: bool) -> Hashable:
        divides = divided and switches.split_keys
        return tuple(
            module.form(batch, *each, dtype, record, divided=divides, e4m3=e4m3, sizes=sizes)
            for each, e4m3 in sorted(product(heads, stored))
        )

    return SoftmaxKernels(
        decode=with_workspaces(
            partial(decode.decode, sizes=sizes, device=record),
            max_num_seqs,
            heads,
            partial(module.num_splits, sizes=sizes),
            switches,
            device,
            sizes.decode.pieces,
        ),
        prefill=partial(prefill.prefill, sizes=sizes, device=record),
        prefill_shared=partial(prefill_shared.prefill_shared, sizes=sizes, device=record),
        undivided_keys=undivided_keys,
        decode_form=decode_form,
    )


def with_workspaces(
    kernel: Callable[..., Tensor],
    max_num_seqs: int,
    heads: Collection[Heads],
    num_splits: Callable[[int, int], int],
    switches: Switches,
    device: torch.device,
    pieces: int = 0,
) -> Callable[..., Tensor]:
    """A decode kernel with one workspace for all layers with the same heads: layers run one after the other."""
    from rosebatch_kernels.common.splits import DecodeWorkspace

    spaces = {
        each: DecodeWorkspace(
            max_num_seqs,
            *each,
            device,
            num_splits if switches.split_keys else None,
            shares=switches.shares_keys,
            pieces=pieces,
        )
        for each in heads
    }

    def run(qkv: Tensor, cache: Tensor, *args: Any, num_heads: int, **options: Any) -> Tensor:
        workspace = spaces[num_heads, cache.shape[2], cache.shape[4]]
        return kernel(
            qkv, cache, *args, workspace=workspace, num_heads=num_heads, append=switches.fused_kv_append, **options
        )

    return run


def _norm_heads(
    whole_rms_norm_: Callable[..., None],
    rms_norm: Callable[..., Tensor],
    uclip_norm: Callable[..., Tensor],
    projection: Tensor,
    num_heads: int,
    kv_heads: int,
    norm: QKNorm,
) -> Tensor:
    if isinstance(norm, WholeRMSNorm):
        whole_rms_norm_(projection, *norm)
        return projection
    heads = projection.unflatten(1, (num_heads + 2 * kv_heads, -1))
    q, k, v = heads.split((num_heads, kv_heads, kv_heads), dim=1)
    if isinstance(norm, HeadUClip):
        q, k = uclip_norm(q, norm.q_alpha, norm.q_gamma), uclip_norm(k, norm.k_alpha, norm.k_gamma)
    elif isinstance(norm, HeadLayerNorm):
        q, k = qkv.normed_heads(q, k, norm)
    else:
        q, k = rms_norm(q, norm.q_weight, norm.eps), rms_norm(k, norm.k_weight, norm.eps)
    return torch.cat((q, k, v), 1).flatten(1)
