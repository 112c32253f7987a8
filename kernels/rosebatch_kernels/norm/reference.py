"""PyTorch reference of the norms. Statistics are fp32 for every input dtype, as in the models' own code."""

import torch
from torch import Tensor
from torch.nn import functional

from rosebatch_kernels.linear.interface import Scales


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm of ``x [T, H]`` with ``weight`` and, unless None, ``bias`` ``[H]``; same dtype out."""
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    x_bias: Tensor | None = None,
    *,
    scales: Scales | None = None,
) -> tuple[Tensor, Tensor]:
    """``residual + (x + x_bias)`` and its LayerNorm: ``(normed [T, H], residual [T, H])``.

    ``x`` is ``[T, H]``; or ``[S, T, H]`` fp32, parts to be added up first (see ``rosebatch_kernels.linear``).
    ``x_bias [H]`` is the bias of the projection that made it (source of the fusion: article S0). With ``scales``,
    ``x [T, H]`` is multiplied by them first.
    """
    residual = _add(x, residual, x_bias, scales)
    return layer_norm(residual, weight, bias, eps), residual


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of ``x [..., H]`` with ``weight [H]``; same dtype out (arXiv 1910.07467).

    The normalised value is rounded to the input's dtype before the weight is applied. With an fp32 weight, as in Gemma
    and OLMo, only the result is rounded.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype) if weight.dtype == x.dtype else (weight * normed).to(x.dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    x_bias: Tensor | None = None,
    scale: float = 1.0,
    *,
    scales: Scales | None = None,
) -> tuple[Tensor, Tensor]:
    """``residual + scale · (x + x_bias)`` and its RMSNorm: ``(normed [T, H], residual [T, H])``.

    See ``add_layer_norm``. Granite has a scale.
    """
    residual = _add(x, residual, x_bias, scales, scale)
    return rms_norm(residual, weight, eps), residual


def add_post_norm(
    x: Tensor,
    residual: Tensor,
    post_weight: Tensor,
    weight: Tensor | None,
    eps: float,
    x_bias: Tensor | None = None,
    *,
    scales: Scales | None = None,
    factor: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``residual + RMSNorm(x + x_bias)`` and its RMSNorm: ``(normed [T, H], residual [T, H])``, see ``add_layer_norm``.

    Both norms are as in ``rms_norm``. The first has ``post_weight [H]``, and its result is rounded to the residual's
    dtype before the addition. The second has ``weight [H]``; None: there is none, and both results are the sum.
    With ``factor [1]`` fp32, the sum is multiplied by it before it is rounded (Gemma 4).
    """
    wide = _wide(x, x_bias, scales)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    if post_weight.dtype == residual.dtype:
        normed = normed.to(residual.dtype)
    added = (post_weight * normed).to(residual.dtype)
    summed = residual + added if factor is None else (residual.float() + added.float()) * factor
    residual = summed.to(residual.dtype)
    return residual if weight is None else rms_norm(residual, weight, eps), residual


def add(x: Tensor, residual: Tensor, x_bias: Tensor | None = None, *, scales: Scales | None = None) -> Tensor:
    """``residual + (x + x_bias)``, ``[T, H]``, see ``add_layer_norm``."""
    return _add(x, residual, x_bias, scales)


def _add(x: Tensor, residual: Tensor, x_bias: Tensor | None, scales: Scales | None, scale: float = 1.0) -> Tensor:
    """The sum in a new tensor, rounded once to the residual's dtype."""
    if x.ndim == 2 and x_bias is None and scales is None and scale == 1.0:
        return residual + x
    return (residual.float() + scale * _wide(x, x_bias, scales)).to(residual.dtype)


def _wide(x: Tensor, x_bias: Tensor | None, scales: Scales | None) -> Tensor:
    """What is added to the residual, in fp32."""
    wide = x.float() if x.ndim == 2 else x.sum(0)
    wide = wide if scales is None else wide * scales.rows[:, None] * scales.columns
    return wide if x_bias is None else wide + x_bias.float()
