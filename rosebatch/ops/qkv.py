"""The kernels between the projection of q, k and v and attention, for all kinds that keep K and V."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from rosebatch.config.switches import Switches
from rosebatch.ops.ops import HeadLayerNorm, HeadNorm, HeadUClip, QKNorm, ValueRMSNorm, WholeRMSNorm
from rosebatch_kernels.common.device import device_of
from rosebatch_kernels.common.sizes import sized
from rosebatch_kernels.qkv import reference, torch_heads


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


def rotation(device: torch.device) -> Callable[..., None]:
    """Rotates q and k in place where nothing else is to be done, see ``rosebatch_kernels.qkv.reference.rotate_``."""
    if device.type != "cuda":
        return reference.rotate_
    from rosebatch_kernels.qkv import kernel

    return partial(kernel.rotate_, device=device_of(device))


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
        q, k = torch_heads.normed_heads(q, k, norm)
    else:
        q, k = rms_norm(q, norm.q_weight, norm.eps), rms_norm(k, norm.k_weight, norm.eps)
        v = torch_heads.normed_values(v, norm.eps) if isinstance(norm, ValueRMSNorm) else v
    return torch.cat((q, k, v), 1).flatten(1)
