"""What normalises q and k before the rotation, and perhaps v."""

from typing import NamedTuple

from torch import Tensor

# The factor after a clip: one number, or a number for each channel, ``[H]`` fp32.
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


class ValueRMSNorm(NamedTuple):
    """``HeadRMSNorm``, and over each head of v one without a weight (Gemma 4)."""

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
HeadNorm = HeadRMSNorm | ValueRMSNorm | HeadLayerNorm | HeadUClip
QKNorm = HeadNorm | WholeRMSNorm


class NormArguments(NamedTuple):
    """A norm of q or of k as a kernel takes it.

    Attributes:
        weight: ``[D]``, or ``[heads, D]``.
        number: eps or gamma.
    """

    weight: Tensor
    number: Gain


def norm_arguments(qk_norm: HeadNorm | None) -> tuple[str | None, NormArguments | None, NormArguments | None]:
    """The kind of norm, and the arguments of a kernel for q and for k.

    The kind ``uclip_each`` has a gamma for each channel, ``layer`` a weight for each head; ``rms_values`` norms v too.
    """
    if qk_norm is None:
        return None, None, None
    if isinstance(qk_norm, HeadUClip):
        kind = "uclip_each" if isinstance(qk_norm.q_gamma, Tensor) else "uclip"
        return kind, NormArguments(qk_norm.q_alpha, qk_norm.q_gamma), NormArguments(qk_norm.k_alpha, qk_norm.k_gamma)
    q_weight, k_weight, eps = qk_norm
    kind = "rms_values" if isinstance(qk_norm, ValueRMSNorm) else "rms"
    kind = "layer" if isinstance(qk_norm, HeadLayerNorm) else kind
    return kind, NormArguments(q_weight, eps), NormArguments(k_weight, eps)
