"""The matrix product with a weight by PyTorch's own operator."""

from torch import Tensor
from torch.nn import functional

from rosebatch_kernels.linear.interface import Linear


class TorchLinear(Linear):
    """``x [T, in] -> [T, out]`` with ``weight [out, in]`` and an optional ``bias [out]``."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return functional.linear(x, self.weight, self.bias)

    def product(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return functional.linear(x, self.weight)


class PaddedLinear:
    """``x [T, in] -> [T, out]`` with the weight padded to a multiple of 64 rows; padding copies the weight.

    cuBLAS picks a slow kernel if the result's rows do not begin at a multiple of 16 bytes: GPT-2's 50257 tokens take
    211 µs for 256 rows on an H100. The result is a view of the padded one.
    """

    def __init__(self, weight: Tensor) -> None:
        self.out_size = len(weight)
        missing = -self.out_size % 64
        self.weight = functional.pad(weight, (0, 0, 0, missing)) if missing else weight

    def __call__(self, x: Tensor) -> Tensor:
        """The product, in x's dtype."""
        return functional.linear(x, self.weight)[:, : self.out_size]
