"""What normalises q and k before the rotation."""

from typing import NamedTuple

from torch import Tensor

# The factor behind a clip: one number, or a number for each channel, ``[H]`` fp32.
Gain = float | Tensor


class HeadUClip(NamedTuple):
    """``gamma · clamp(alpha · x, -1, 1)`` (source: article S4).

    Each alpha is ``[D]``. The gammas are two numbers, or ``[D]`` both.
    """

    q_alpha: Tensor
    k_alpha: Tensor
    q_gamma: Gain
    k_gamma: Gain


class HeadRMSNorm(NamedTuple):
    """RMSNorm over each head; all heads share a weight ``[D]`` (Qwen 3, Gemma 3)."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


class HeadLayerNorm(NamedTuple):
    """LayerNorm over each head, without a bias; weights ``[heads, D]`` and ``[kv_heads, D]`` (Cohere, StableLM)."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


class WholeRMSNorm(NamedTuple):
    """RMSNorm over all heads together; weights ``[heads · D]`` and ``[kv_heads · D]`` (OLMo 2)."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


# Of each head by itself: kernels that rotate heads apply these as well.
HeadNorm = HeadRMSNorm | HeadLayerNorm | HeadUClip
QKNorm = HeadNorm | WholeRMSNorm


def norm_arguments(qk_norm: HeadNorm | None, unused: Tensor) -> tuple[str | None, Tensor, Tensor, Gain, Gain]:
    """Arguments of a kernel: the kind of norm, the weights of q and k, and the number of each (eps or gamma).

    The kind ``uclip_each`` has a gamma for each channel, ``layer`` a weight for each head.

    Args:
        qk_norm: None gives the kind None.
        unused: any tensor, passed as a weight where there is no norm.
    """
    if qk_norm is None:
        return None, unused, unused, 0.0, 0.0
    if isinstance(qk_norm, HeadUClip):
        return "uclip_each" if isinstance(qk_norm.q_gamma, Tensor) else "uclip", *qk_norm
    q_weight, k_weight, eps = qk_norm
    return "layer" if isinstance(qk_norm, HeadLayerNorm) else "rms", q_weight, k_weight, eps, eps
