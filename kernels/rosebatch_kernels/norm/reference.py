"""PyTorch reference of the norms. Statistics are fp32 for every input dtype, as in the models' own code."""

import torch
from torch import Tensor
from torch.nn import functional


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm of ``x [T, H]`` with ``weight`` and ``bias`` ``[H]``; same dtype out."""
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float, x_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``residual + (x + x_bias)`` and its LayerNorm: ``(normed [T, H], residual [T, H])``.

    ``x`` is ``[T, H]``; or ``[S, T, H]`` fp32, parts to be added up first (see ``rosebatch_kernels.linear``).
    ``x_bias [H]`` is the bias of the projection that made it (source of the fusion: article S0).
    """
    residual = _add(x, residual, x_bias)
    return layer_norm(residual, weight, bias, eps), residual


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of ``x [..., H]`` with ``weight [H]``; same dtype out (arXiv 1910.07467).

    The normalised value is rounded to the input's dtype before the weight is applied.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, x_bias: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``residual + (x + x_bias)`` and its RMSNorm: ``(normed [T, H], residual [T, H])``, see ``add_layer_norm``."""
    residual = _add(x, residual, x_bias)
    return rms_norm(residual, weight, eps), residual


def _add(x: Tensor, residual: Tensor, x_bias: Tensor | None) -> Tensor:
    """The sum in a new tensor, rounded once to the residual's dtype."""
    if x.ndim == 2 and x_bias is None:
        return residual + x
    wide = x.float() if x.ndim == 2 else x.sum(0)
    return (residual.float() + (wide if x_bias is None else wide + x_bias.float())).to(residual.dtype)
