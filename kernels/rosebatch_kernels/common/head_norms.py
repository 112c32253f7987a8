"""What normalises each head of q and k before the rotation: RMSNorm or UClip."""

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


# ``(q weight [D], k weight [D], eps)`` of an RMSNorm over each head, or a UClip of its channels.
QKNorm = tuple[Tensor, Tensor, float] | HeadUClip


def norm_arguments(qk_norm: QKNorm | None, unused: Tensor) -> tuple[str | None, Tensor, Tensor, Gain, Gain]:
    """Arguments of a kernel: the kind of norm, the weights of q and k, and the number of each (eps or gamma).

    The kind ``uclip_each`` has a gamma for each channel.

    Args:
        qk_norm: None gives the kind None.
        unused: any tensor, passed as a weight where there is no norm.
    """
    if qk_norm is None:
        return None, unused, unused, 0.0, 0.0
    if isinstance(qk_norm, HeadUClip):
        return "uclip_each" if isinstance(qk_norm.q_gamma, Tensor) else "uclip", *qk_norm
    q_weight, k_weight, eps = qk_norm
    return "rms", q_weight, k_weight, eps, eps
