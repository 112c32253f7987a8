"""The matrix product on a GPU, with the operators that follow it: our kernels where they are ahead, or cuBLAS."""

import torch
from torch import Tensor

from rosebatch_kernels.linear import kernel
from rosebatch_kernels.linear.gated import can_gate, gated
from rosebatch_kernels.linear.head import can_stream_head, logits
from rosebatch_kernels.linear.torch_linear import PaddedLinear, TorchLinear
from rosebatch_kernels.linear.tuned import TUNED


def can_stream(weight: Tensor) -> bool:
    """Whether the kernel serves the weight: 16 bits, and a GPU with 227 KiB of shared memory in a block."""
    if weight.dtype.itemsize != 2:
        return False
    return weight.device.type == "cpu" or torch.cuda.get_device_capability(weight.device)[0] in (9, 10)


class StreamedLinear(TorchLinear):
    """``x [T, in] -> [T, out]`` in a 16-bit type; our kernels include the activation."""

    def streams(self, x: Tensor) -> bool:
        """Whether the kernel computes the product of these rows."""
        return len(x) <= TUNED.max_rows and self.weight.numel() <= TUNED.max_elements

    def divides(self, x: Tensor) -> bool:
        """See ``Linear``."""
        return len(x) <= TUNED.max_rows_in_parts and self.weight.numel() <= TUNED.max_elements

    def adds_in_place(self, x: Tensor) -> bool:
        """See ``Linear``."""
        return len(x) >= TUNED.min_rows_onto and self.bias is None

    def add_(self, x: Tensor, onto: Tensor) -> Tensor:
        """See ``Linear``; by cuBLAS: the product is rounded once, as the sum."""
        return onto.addmm_(x, self.weight.t())

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        if self.streams(x):
            return kernel.linear(x, self.weight, self.bias)
        return super().__call__(x)

    def product(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        return kernel.linear(x, self.weight) if self.streams(x) else super().product(x)

    def parts(self, x: Tensor) -> Tensor:
        """See ``kernel.parts``."""
        return kernel.parts(x, self.weight)

    def gates(self, x: Tensor, activation: str) -> bool:
        """Whether the kernel for many rows computes both halves of the product and the activation between them."""
        return self.bias is None and can_gate(x, self.weight, activation)

    def activates(self, x: Tensor, activation: str) -> bool:
        """See ``Linear``."""
        in_cublas = activation == "gelu_tanh" and self.bias is not None
        return self.streams(x) or self.gates(x, activation) or in_cublas

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """The activated product, see ``kernel.linear``; of many rows by ``gated``, or by cuBLAS, which has GELU."""
        if self.streams(x):
            return kernel.linear(x, self.weight, self.bias, activation)
        if self.gates(x, activation):
            return gated(x, self.weight, activation)
        assert activation == "gelu_tanh" and self.bias is not None
        out: Tensor = torch._addmm_activation(self.bias, x, self.weight.t(), use_gelu=True)
        return out


class StreamedHead(PaddedLinear):
    """The output projection; our kernel reads the weight faster for few rows."""

    def __call__(self, x: Tensor) -> Tensor:
        """The product, in x's dtype."""
        if can_stream_head(x, self.weight):
            return logits(x, self.weight)[:, : self.out_size]
        return super().__call__(x)
