"""A product of each head with a matrix of its own, by PyTorch: ``x [T, heads, in] -> [T, heads, out]``."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# ``out``, rows and heads at any stride, is written and returned; None for a new tensor.
HeadProducts = Callable[..., Tensor]


class ApartHeads:
    """A product of their own for each head.

    Args:
        products: ``[T, in] -> [T, out]`` of each.
    """

    def __init__(self, products: Sequence[Callable[[Tensor], Tensor]]) -> None:
        self.products = products

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See ``HeadProducts``."""
        each = [product(own) for product, own in zip(self.products, x.unbind(1), strict=True)]
        if out is None:
            return torch.stack(each, 1)
        for own, result in zip(out.unbind(1), each, strict=True):
            own.copy_(result)
        return out


class BatchedHeads:
    """One product of a batch of heads. The library's order of sums may go by the number of rows.

    Args:
        weight: ``[heads, out, in]``.
    """

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight.transpose(1, 2)

    def __call__(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """See ``HeadProducts``."""
        if out is None:
            out = x.new_empty(*x.shape[:2], self.weight.shape[2])
        torch.bmm(x.transpose(0, 1), self.weight, out=out.transpose(0, 1))
        return out
