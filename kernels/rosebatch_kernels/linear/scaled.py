"""A product whose columns have factors."""

from torch import Tensor

from rosebatch_kernels.linear.interface import Linear


class ScaledLinear(Linear):
    """The result of a linear, its bias included, times ``factors [out]`` fp32; rounded once more."""

    def __init__(self, linear: Linear, factors: Tensor) -> None:
        self.linear = linear
        self.factors = factors
        self.bias = None if linear.bias is None else (linear.bias * factors).to(linear.bias.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return self.linear(x).mul_(self.factors)

    def product(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return self.linear.product(x).mul_(self.factors)
