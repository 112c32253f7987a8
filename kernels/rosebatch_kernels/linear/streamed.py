"""The matrix product on a GPU: few rows by our kernel, what follows the product with it, many rows by cuBLAS."""

import torch
from torch import Tensor

from rosebatch_kernels.linear import kernel
from rosebatch_kernels.linear.reference import Linear

# Where the kernel was found faster than cuBLAS on an H100: rows of a product, and of one in parts; elements
# of the weight, above which reading it takes so long that nothing else counts.
_MOST_ROWS = 64
_MOST_ROWS_IN_PARTS = 128
_MOST_ELEMENTS = 2**23


def can_stream(weight: Tensor) -> bool:
    """Whether the kernel serves the weight: 16 bits, and a GPU with 227 KiB of shared memory in a block."""
    if weight.dtype.itemsize != 2:
        return False
    return weight.device.type == "cpu" or torch.cuda.get_device_capability(weight.device)[0] in (9, 10)


class StreamedLinear(Linear):
    """``x [T, in] -> [T, out]`` in a 16-bit type; what follows the product can be had with it where rows are few."""

    def streams(self, x: Tensor) -> bool:
        """Whether the product of these rows is the kernel."""
        return len(x) <= _MOST_ROWS and self.weight.numel() <= _MOST_ELEMENTS

    def divides(self, x: Tensor) -> bool:
        """Whether the product of these rows is better had in parts, where the consumer can add them up."""
        return len(x) <= _MOST_ROWS_IN_PARTS and self.weight.numel() <= _MOST_ELEMENTS

    def __call__(self, x: Tensor) -> Tensor:
        """The product plus the bias, in x's dtype."""
        return kernel.linear(x, self.weight, self.bias) if self.streams(x) else super().__call__(x)

    def product(self, x: Tensor) -> Tensor:
        """The product alone."""
        return kernel.linear(x, self.weight) if self.streams(x) else super().product(x)

    def parts(self, x: Tensor) -> Tensor:
        """The product alone in parts, see ``kernel.parts``."""
        return kernel.parts(x, self.weight)

    def activates(self, x: Tensor, activation: str) -> bool:
        """Whether ``activated`` serves these rows."""
        return self.streams(x) or (activation == "gelu_tanh" and self.bias is not None)

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """The activated product, see ``kernel.linear``; many rows by cuBLAS, which knows one of the activations."""
        if self.streams(x):
            return kernel.linear(x, self.weight, self.bias, activation)
        assert activation == "gelu_tanh" and self.bias is not None
        out: Tensor = torch._addmm_activation(self.bias, x, self.weight.t(), use_gelu=True)
        return out
