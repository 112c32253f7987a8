"""The kernels that only the runner of a GPU calls, as switches choose them at load."""

import sys
from collections.abc import Callable, Collection, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rosebatch.config.switches import Switches
from rosebatch.ops.ops import HeadLayerNorm, HeadNorm, Heads, HeadUClip, QKNorm, WholeRMSNorm
from rosebatch_kernels.qkv import torch_heads as qkv


@dataclass(frozen=True, slots=True)
class DeviceOps:
    """The kernels that only the Triton runner calls; each of them documents shapes and dtypes.

    Attributes:
        prefill_shared: where chunks share tiles.
        gated_decode, gated_prefill: those of HP1 attention.
        undivided_keys: most keys of a row, by batch size and dtype, that ``decode`` never divides.
        decode_form: what batch size, dtype, and whether rows are divided change in the compiled kernels of both
            decodes.
        tile_rows: most query tokens of a tile of either prefill.
        decode_appends: whether both decode kernels write the new K and V to the cache.
        decode_rotates: whether they also norm and rotate q and k; only if they append.
        prepare: norms, rotates and appends in one; None to do so by the operators of ``Ops``.
        norms_apart: whether neither ``prepare`` nor an operator of ``Ops`` applies this norm.
        delta_decode: convolution and gated delta rule of a decode step.
        norm_heads: applies it before those: takes a projection, query heads, K/V heads and the norm, and returns the
            projection, the same or a new one.
        sample_rows: from logits to tokens inside a graph; None to sample by the operators of ``Ops``, outside.
    """

    decode: Callable[..., Tensor]
    prefill: Callable[..., Tensor]
    prefill_shared: Callable[..., Tensor]
    gated_decode: Callable[..., Tensor]
    gated_prefill: Callable[..., Tensor]
    undivided_keys: Callable[[int, torch.dtype], int]
    decode_form: Callable[..., Hashable]
    tile_rows: int
    decode_appends: bool
    decode_rotates: bool
    prepare: Callable[..., None] | None
    norms_apart: Callable[[QKNorm], bool]
    delta_decode: Callable[..., Tensor]
    norm_heads: Callable[[Tensor, int, int, QKNorm], Tensor]
    sample_rows: Callable[..., Tensor] | None
    adjust: Callable[..., Tensor]
    mask_: Callable[[Tensor, Tensor, Tensor], None]
    count_: Callable[[Tensor, Tensor, Tensor | None], None]
    advance: Callable[..., None]


def device_ops(
    max_num_seqs: int, softmax: Collection[Heads], gated: Collection[Heads], switches: Switches, device: torch.device
) -> DeviceOps:
    """The kernels for a model, with the memory that they keep between calls.

    Args:
        max_num_seqs: most sequences of a step.
        softmax, gated: the heads of its layers, those with HP1's gate apart.
        toggles: switches.
        device: of the run.
    """
    from rosebatch_kernels.common import splits
    from rosebatch_kernels.feedback import kernel as feedback
    from rosebatch_kernels.gated_delta import decode as delta_decode
    from rosebatch_kernels.hp1 import decode as hp1_decode
    from rosebatch_kernels.hp1 import prefill as hp1_prefill
    from rosebatch_kernels.logits import kernel as logits_kernel
    from rosebatch_kernels.paged_attention import decode, decode_sizes, prefill, prefill_shared
    from rosebatch_kernels.qkv import kernel as qkv_kernel
    from rosebatch_kernels.sampling import kernel as sampling_kernel

    def with_workspaces(
        kernel: Callable[..., Tensor], heads: Collection[Heads], num_splits: Callable[[int, int], int]
    ) -> Callable[..., Tensor]:
        """One workspace for all layers with the same heads: layers run one after the other."""
        spaces = {
            each: splits.DecodeWorkspace(
                max_num_seqs,
                *each,
                device,
                num_splits if switches.split_keys else None,
                shares=switches.shared_prefix_attention,
            )
            for each in heads
        }

        def run(qkv: Tensor, cache: Tensor, *args: Any, num_heads: int, **options: Any) -> Tensor:
            workspace = spaces[num_heads, cache.shape[2], cache.shape[4]]
            return kernel(
                qkv, cache, *args, workspace=workspace, num_heads=num_heads, append=switches.fused_kv_append, **options
            )

        return run

    def norms_apart(norm: QKNorm) -> bool:
        """``prepare`` norms each head by itself. Without it, the operator that splits heads applies every norm."""
        return switches.fused_rotary and not (switches.fused_qk_norm and isinstance(norm, HeadNorm))

    def undivided_keys(batch: int, dtype: torch.dtype) -> int:
        if not switches.split_keys:
            return sys.maxsize
        each = (decode_sizes.undivided_keys(batch, num_heads, kv_heads, dtype) for num_heads, kv_heads, _ in softmax)
        return min(each, default=sys.maxsize)

    def decode_form(batch: int, dtype: torch.dtype, *, divided: bool) -> Hashable:
        divides = divided and switches.split_keys
        forms = tuple(decode_sizes.form(batch, *each, dtype, device, divided=divides) for each in sorted(softmax))
        return forms, tuple(hp1_decode.num_splits(batch, kv_heads) for _, kv_heads, _ in sorted(gated))

    gated_decode = partial(hp1_decode.decode, sparse=switches.sparse_values)
    return DeviceOps(
        decode=with_workspaces(decode.decode, softmax, splits.num_splits),
        prefill=prefill.prefill,
        prefill_shared=prefill_shared.prefill_shared,
        gated_decode=with_workspaces(gated_decode, gated, hp1_decode.num_splits),
        gated_prefill=hp1_prefill.prefill,
        undivided_keys=undivided_keys,
        decode_form=decode_form,
        tile_rows=prefill.TILE_ROWS,
        decode_appends=switches.fused_kv_append,
        decode_rotates=switches.fused_kv_append and switches.fused_rotary,
        prepare=qkv_kernel.prepare if switches.fused_rotary else None,
        norms_apart=norms_apart,
        norm_heads=_norm_heads,
        delta_decode=delta_decode.decode,
        sample_rows=sampling_kernel.sample_rows if switches.fused_sampler else None,
        adjust=logits_kernel.adjust,
        mask_=logits_kernel.mask_,
        count_=logits_kernel.count_,
        advance=feedback.advance,
    )


def _norm_heads(projection: Tensor, num_heads: int, kv_heads: int, norm: QKNorm) -> Tensor:
    from rosebatch_kernels.norm.kernel import rms_norm
    from rosebatch_kernels.qkv.kernel import whole_rms_norm_
    from rosebatch_kernels.uclip.kernel import uclip_norm

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
