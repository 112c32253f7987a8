"""PyTorch reference of the matrix product with a weight."""

from torch import Tensor
from torch.nn import functional


class Linear:
    """``x [T, in] -> [T, out]`` with ``weight [out, in]`` and an optional ``bias [out]``."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """The product plus the bias, in x's dtype."""
        return functional.linear(x, self.weight, self.bias)

    def product(self, x: Tensor) -> Tensor:
        """The product alone."""
        return functional.linear(x, self.weight)
