"""What makes a vector of a patch, as the product that it is."""

from typing import Any

from torch import Tensor
from torch.nn import Module, Parameter
from torch.nn.functional import linear


class PatchProduct(Module):
    """In place of a convolution whose kernel is a whole patch: PyTorch has slow kernels for it in three dimensions.

    Args:
        convolution: transformers', ``[H, ...]``; its weight is shared.
    """

    def __init__(self, convolution: Any) -> None:
        super().__init__()
        self.weight, self.bias = Parameter(convolution.weight.flatten(1), requires_grad=False), convolution.bias

    def forward(self, patches: Tensor) -> Tensor:
        """``[N, H]`` of ``[N, ...]`` in the shape of the kernel."""
        return linear(patches.flatten(1), self.weight, self.bias)
