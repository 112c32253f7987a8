"""PyTorch reference of the matrix product with a weight, and of what can follow it in one kernel."""

from torch import Tensor
from torch.nn import functional

from rosebatch_kernels.mlp import reference as mlp

_ACTIVATIONS = {**mlp.ACTIVATIONS, "silu_mul": mlp.silu_mul, "relu_mul": mlp.relu_mul}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, activation: str | None = None) -> Tensor:
    """``activation(x @ weightᵀ + bias)`` for ``x [T, in]``, ``weight [out, in]``, ``bias [out]``: ``[T, out]``.

    ``activation`` is ``gelu_tanh``, ``gelu_erf``, ``relu``; or ``silu_mul``, ``relu_mul``, where the first half of the
    columns is the gate of the second, and half as many come out.
    """
    out = functional.linear(x, weight, bias)
    return out if activation is None else _ACTIVATIONS[activation](out)


def parts(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weightᵀ`` in parts ``[S, T, out]`` fp32, to be added up by whoever reads them; here in a single one."""
    return functional.linear(x.float(), weight.float())[None]


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


class PaddedLinear:
    """``x [T, in] -> [T, out]`` with the weight padded to a multiple of 64 rows: a copy, unless it is one already.

    cuBLAS takes a slow kernel where the result's rows do not begin at a multiple of 16 bytes: GPT-2's 50257 tokens
    cost 211 µs for 256 rows on an H100. The result is a view of the padded one.
    """

    def __init__(self, weight: Tensor) -> None:
        self.out_size = len(weight)
        missing = -self.out_size % 64
        self.weight = functional.pad(weight, (0, 0, 0, missing)) if missing else weight

    def __call__(self, x: Tensor) -> Tensor:
        """The product, in x's dtype."""
        return functional.linear(x, self.weight)[:, : self.out_size]
