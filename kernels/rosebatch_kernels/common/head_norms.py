"""What normalises each head of q and k before the rotation: RMSNorm or UClip."""

from typing import NamedTuple

from torch import Tensor


class HeadUClip(NamedTuple):
    """``gamma · clamp(alpha · x, -1, 1)`` (source: article S4); each alpha is ``[D]``."""

    q_alpha: Tensor
    k_alpha: Tensor
    q_gamma: float
    k_gamma: float


# ``(q weight [D], k weight [D], eps)`` of an RMSNorm over each head, or a UClip of its channels.
QKNorm = tuple[Tensor, Tensor, float] | HeadUClip


def norm_arguments(qk_norm: QKNorm | None, unused: Tensor) -> tuple[str | None, Tensor, Tensor, float, float]:
    """Arguments of a kernel: the kind of norm, the weights of q and k, and the number of each (eps or gamma).

    Args:
        qk_norm: None gives the kind None.
        unused: any tensor, passed as a weight where there is no norm.
    """
    if qk_norm is None:
        return None, unused, unused, 0.0, 0.0
    if isinstance(qk_norm, HeadUClip):
        return "uclip", *qk_norm
    q_weight, k_weight, eps = qk_norm
    return "rms", q_weight, k_weight, eps, eps
