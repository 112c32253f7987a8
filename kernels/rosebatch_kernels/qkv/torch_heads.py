"""q, k and v of the fused projection on a CPU: split into heads, QK norm, rotary positions."""

import torch
from torch import Tensor
from torch.nn import functional

from rosebatch_kernels.common.head_norms import HeadLayerNorm, HeadUClip, QKNorm, ValueRMSNorm, WholeRMSNorm
from rosebatch_kernels.norm.reference import rms_norm
from rosebatch_kernels.uclip.reference import uclip_norm


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channel ``i`` with channel ``i + R/2`` of each head, as the Llama family does (arXiv 2104.09864).

    Args:
        x: ``[T, heads, D]``; channels from R on stay as they are.
        cos: ``[T, 1, R]`` in x's dtype, both halves equal.
        sin: ``[T, 1, R]`` in x's dtype, the first half negated.

    Returns:
        ``[T, heads, D]``.
    """
    size = cos.shape[-1]
    if size < x.shape[-1]:
        return torch.cat((rope(x[..., :size], cos, sin), x[..., size:]), -1)
    return torch.addcmul(x * cos, x.roll(size // 2, -1), sin)


def split_heads(
    qkv: Tensor,
    num_heads: int,
    kv_heads: int,
    rotary: tuple[Tensor, Tensor] | None = None,
    qk_norm: QKNorm | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of packed tokens, with q and k normalised and rotated, and v perhaps normalised.

    Args:
        qkv: ``[T, (heads + 2 · kv_heads) · D]``, q then k then v.
        num_heads, kv_heads: of q, and of k and v.
        rotary: ``(cos, sin)`` of the tokens' positions, ``[T, 1, R]`` each in qkv's dtype, see ``rope``.
        qk_norm: before the rotation.

    Returns:
        q ``[T, heads, D]``, k and v ``[T, kv_heads, D]``.
    """
    count = num_heads + 2 * kv_heads
    heads = qkv.view(len(qkv), count, qkv.shape[1] // count)
    q, k, v = heads.split((num_heads, kv_heads, kv_heads), dim=1)
    if rotary is None and qk_norm is None:
        return q, k, v
    rotated = heads[:, : num_heads + kv_heads]
    if qk_norm is not None:
        rotated = torch.cat(normed_heads(q, k, qk_norm), dim=1)
    if isinstance(qk_norm, ValueRMSNorm):
        v = normed_values(v, qk_norm.eps)
    if rotary is not None:
        rotated = rope(rotated, *rotary)
    q, k = rotated.split((num_heads, kv_heads), dim=1)
    return q, k, v


def normed_heads(q: Tensor, k: Tensor, norm: QKNorm) -> tuple[Tensor, Tensor]:
    """q ``[T, heads, D]`` and k ``[T, kv_heads, D]`` after their norm."""
    if isinstance(norm, HeadUClip):
        return uclip_norm(q, norm.q_alpha, norm.q_gamma), uclip_norm(k, norm.k_alpha, norm.k_gamma)
    q_weight, k_weight, eps = norm
    if isinstance(norm, WholeRMSNorm):
        q, k = (rms_norm(x.flatten(1), weight, eps).view(x.shape) for x, weight in ((q, q_weight), (k, k_weight)))
        return q, k
    normed = _head_layer_norm if isinstance(norm, HeadLayerNorm) else rms_norm
    return normed(q, q_weight, eps), normed(k, k_weight, eps)


def normed_values(v: Tensor, eps: float) -> Tensor:
    """RMSNorm over each head of v ``[T, kv_heads, D]``, without a weight; fp32 inside, rounded once."""
    wide = v.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(v.dtype)


def _head_layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """LayerNorm of ``x [T, heads, D]`` with ``weight [heads, D]``; fp32 inside, rounded once."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (functional.layer_norm(wide, x.shape[-1:], eps=eps) * weight).to(x.dtype)
