"""Products of a batch of matrices whose bits do not depend on how many there are, on a CPU."""

from torch import Tensor


def batched_product(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` of ``[B, N, R, K]`` and ``[B, N, K, C]``: ``[B, N, R, C]``.

    The library divides the depth of a single product among threads. Of two or more, it computes each as it is. So one
    is computed twice.
    """
    if a.shape[0] * a.shape[1] > 1:
        return a @ b
    return (a.expand(2, -1, -1, -1) @ b.expand(2, -1, -1, -1))[:1]
