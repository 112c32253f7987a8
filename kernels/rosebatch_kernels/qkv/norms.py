"""What q and k can go through, head by head, before they are rotated."""

from typing import NamedTuple

from torch import Tensor


class HeadUClip(NamedTuple):
    """``gamma · clamp(alpha · x, -1, 1)`` (source: article S4): alphas ``[D]``."""

    q_alpha: Tensor
    k_alpha: Tensor
    q_gamma: float
    k_gamma: float


# ``(q weight [D], k weight [D], eps)`` of an RMSNorm over each head, or a clip of its channels.
QKNorm = tuple[Tensor, Tensor, float] | HeadUClip


def norm_arguments(qk_norm: QKNorm | None, unused: Tensor) -> tuple[str | None, Tensor, Tensor, float, float]:
    """What kernels take: the kind, the weights of q and k, and a number for each, eps or gamma."""
    if qk_norm is None:
        return None, unused, unused, 0.0, 0.0
    if isinstance(qk_norm, HeadUClip):
        return "uclip", *qk_norm
    q_weight, k_weight, eps = qk_norm
    return "rms", q_weight, k_weight, eps, eps
