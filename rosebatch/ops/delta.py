"""The gated delta rule: types of its arguments, and the kernel of decode steps."""

from collections.abc import Callable

from torch import Tensor

from rosebatch_kernels.gated_delta.layout import DeltaState, DeltaWeights

__all__ = ["DeltaState", "DeltaWeights", "decode_kernel"]


def decode_kernel() -> Callable[..., Tensor]:
    """Convolution and gated delta rule of a decode step in the Triton runner."""
    from rosebatch_kernels.gated_delta import decode

    return decode.decode
