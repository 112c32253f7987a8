"""PyTorch reference of the norms. Statistics are fp32 whatever the input, as in the models' own code."""

import torch
from torch import Tensor
from torch.nn import functional


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """LayerNorm of ``x [T, H]`` with ``weight`` and ``bias`` ``[H]``; same dtype out."""
    return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``residual + x`` and its LayerNorm: ``(normed [T, H], residual [T, H])``."""
    residual = residual + x
    return layer_norm(residual, weight, bias, eps), residual


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of ``x [..., H]`` with ``weight [H]``; same dtype out (arXiv 1910.07467).

    The normalised value is rounded to the input's dtype before the weight is applied.
    """
    wide = x.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * (wide * scale).to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """``residual + x`` and its RMSNorm: ``(normed [T, H], residual [T, H])``."""
    residual = residual + x
    return rms_norm(residual, weight, eps), residual
