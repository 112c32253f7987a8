"""The matrix product on a GPU, with the operators that follow it: our kernels where they are ahead, or cuBLAS."""

import torch
from torch import Tensor

from rosebatch_kernels.common.activations import GATES
from rosebatch_kernels.common.device import HOPPER, SHARED_MEMORY, Device
from rosebatch_kernels.common.sizes import value_at
from rosebatch_kernels.linear import gated, head, kernel, sizes
from rosebatch_kernels.linear.torch_linear import PaddedLinear, TorchLinear


def can_stream(weight: Tensor, device: Device) -> bool:
    """Whether the kernels serve the weight: 16 bits, and a GPU with the shared memory of Hopper."""
    return weight.dtype.itemsize == 2 and device.shared_memory >= SHARED_MEMORY[HOPPER]


class StreamedLinear(TorchLinear):
    """``x [T, in] -> [T, out]`` in a 16-bit type; our kernels include the activation.

    Args:
        weight, bias: see ``TorchLinear``.
        device: decides the sizes of programs.
        invariant: whether all numbers of rows are multiplied and rounded alike.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, device: Device, *, invariant: bool = False) -> None:
        super().__init__(weight, bias)
        self._device = device
        self._invariant = invariant
        self._sizes = sizes.SIZES.of(device).invariant() if invariant else sizes.SIZES.of(device)
        self._gated_sizes = gated.SIZES.of(device)

    def streams(self, x: Tensor) -> bool:
        """Whether the kernel computes the product of these rows."""
        return len(x) <= self._sizes.max_rows and self.weight.numel() <= self._sizes.max_elements

    def divides(self, x: Tensor) -> bool:
        """See ``Linear``."""
        return len(x) <= self._sizes.max_rows_in_parts and self.weight.numel() <= self._sizes.max_elements

    def adds_in_place(self, x: Tensor) -> bool:
        """See ``Linear``."""
        return len(x) >= self._sizes.min_rows_onto and self.bias is None

    def add_(self, x: Tensor, onto: Tensor) -> Tensor:
        """See ``Linear``; both ways round the product before the sum."""
        if self.streams(x) and len(x) <= value_at(self._sizes.max_rows_onto, x.shape[1]):
            return kernel.add_(x, self.weight, onto, sizes=self._sizes, device=self._device)
        return onto.addmm_(x, self.weight.t())

    def __call__(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        if self.streams(x):
            return kernel.linear(x, self.weight, self.bias, sizes=self._sizes, device=self._device)
        return super().__call__(x)

    def product(self, x: Tensor) -> Tensor:
        """See ``Linear``."""
        if self.streams(x):
            return kernel.linear(x, self.weight, sizes=self._sizes, device=self._device)
        return super().product(x)

    def parts(self, x: Tensor) -> Tensor:
        """See ``kernel.parts``."""
        return kernel.parts(x, self.weight, sizes=self._sizes, device=self._device)

    def gates(self, x: Tensor, activation: str) -> bool:
        """Whether the kernel for many rows computes both halves of the product and the activation between them."""
        return self.bias is None and gated.can_gate(x, self.weight, activation, sizes=self._gated_sizes)

    def activates(self, x: Tensor, activation: str) -> bool:
        """See ``Linear``. One that is no gate follows a sum in fp32 here, elsewhere a rounded one."""
        if self._invariant and activation not in GATES:
            return False
        in_cublas = activation == "gelu_tanh" and self.bias is not None
        return self.streams(x) or self.gates(x, activation) or in_cublas

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """The activated product, see ``kernel.linear``; of many rows by ``gated``, or by cuBLAS, which has GELU."""
        if self.streams(x):
            return kernel.linear(x, self.weight, self.bias, activation, sizes=self._sizes, device=self._device)
        if self.gates(x, activation):
            return gated.gated(x, self.weight, activation, sizes=self._gated_sizes, device=self._device)
        assert activation == "gelu_tanh" and self.bias is not None
        out: Tensor = torch._addmm_activation(self.bias, x, self.weight.t(), use_gelu=True)
        return out


class StreamedHead(PaddedLinear):
    """The output projection; our kernel reads the weight faster for few rows.

    Args:
        weight: see ``PaddedLinear``.
        device: decides the sizes of programs.
    """

    def __init__(self, weight: Tensor, device: Device) -> None:
        super().__init__(weight)
        self._device = device
        self._sizes = head.SIZES.of(device)

    def __call__(self, x: Tensor) -> Tensor:
        """The product, in x's dtype."""
        if head.can_stream_head(x, self.weight, sizes=self._sizes):
            return head.logits(x, self.weight, sizes=self._sizes, device=self._device)[:, : self.out_size]
        return super().__call__(x)
