"""PyTorch reference of UClipNorm, ``gamma · clamp(alpha · x, -1, 1)``: fp32 inside, rounded once.

alpha has a number for each channel. gamma has one too, or is one number. A model whose alpha is one number repeats it.
A relative of DyT (arXiv 2503.10622), which has tanh in place of the clip.
"""

from torch import Tensor

from rosebatch_kernels.common.head_norms import Gain


def uclip_norm(x: Tensor, alpha: Tensor, gamma: Gain) -> Tensor:
    """UClipNorm of ``x [..., H]`` with ``alpha [H]`` and gamma a number or ``[H]`` fp32; same dtype out."""
    wide = x.double() if x.dtype.itemsize == 8 else x.float()
    return ((wide * alpha.to(wide.dtype)).clamp(-1, 1) * gamma).to(x.dtype)


def add_uclip_norm(
    y: Tensor, residual: Tensor, post_alpha: Tensor, post_gamma: Gain, alpha: Tensor, gamma: Gain
) -> tuple[Tensor, Tensor]:
    """``residual + UClip_post(y)``, and its UClipNorm: ``(normed [T, H], residual [T, H])``, both new.

    ``y`` is ``[T, H]``; or ``[S, T, H]`` fp32, parts to be added up first (see ``rosebatch_kernels.linear``). The
    clipped value is rounded to the residual's dtype before the addition (source: article S4), and so is the sum.
    """
    whole = y if y.ndim == 2 else y.sum(0)
    post = ((whole.float() * post_alpha.float()).clamp(-1, 1) * post_gamma).to(residual.dtype)
    total = residual + post
    return uclip_norm(total, alpha, gamma), total
