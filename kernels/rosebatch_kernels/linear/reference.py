"""PyTorch reference of the matrix product with a weight, and of the operators that can follow it in one kernel."""

from torch import Tensor
from torch.nn import functional

from rosebatch_kernels.mlp import reference as mlp

_ACTIVATIONS = {**mlp.ACTIVATIONS, **mlp.GATED}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """``activation(x @ weightᵀ + bias)`` for ``x [T, in]``, ``weight [out, in]``, ``bias [out]``: ``[T, out]``.

    ``activation`` is ``gelu_tanh``, ``gelu_erf`` or ``relu``; or a gated one such as ``silu_mul``, where the first
    half of the columns is the gate of the second, and the result has half as many columns.
    """
    out = functional.linear(x, weight, bias)
    return out if activation is None else _ACTIVATIONS[activation](out)


def add_(x: Tensor, weight: Tensor, onto: Tensor) -> Tensor:
    """``onto + x @ weightᵀ`` in ``onto [T, out]``; the product is rounded before the sum."""
    return onto.add_(functional.linear(x.float(), weight.float()).to(x.dtype))


def parts(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weightᵀ`` in parts ``[S, T, out]`` fp32, which the reader adds up; here in a single part."""
    return functional.linear(x.float(), weight.float())[None]
