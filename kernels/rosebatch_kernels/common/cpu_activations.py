"""Activations whose bits do not depend on an element's place, on a CPU.

PyTorch's own compute the end of a vector loop with other instructions than its middle. That may change the last bit.
Its ``exp``, ``erf`` and ``tanh`` do not. In 16 bit, rounding hides the difference of SiLU, and not that of GELU.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

_ROOT_OF_HALF, _ROOT_OF_2_BY_PI = math.sqrt(0.5), math.sqrt(2 / math.pi)


def logistic(x: Tensor) -> Tensor:
    """``1 / (1 + exp(-x))``."""
    return 1 / (1 + torch.exp(-x))


def softplus(x: Tensor) -> Tensor:
    """``log(1 + exp(x))``."""
    return x.clamp_min(0) + torch.log1p(torch.exp(-x.abs()))


def silu(x: Tensor) -> Tensor:
    """``x / (1 + exp(-x))``."""
    if not (x.is_cpu and x.dtype is torch.float32):
        return functional.silu(x)
    return x / torch.neg(x).exp_().add_(1)


def gelu(x: Tensor) -> Tensor:
    """Exact GELU, by the error function."""
    if not _needs_care(x):
        return functional.gelu(x)
    exact = x.float()
    return torch.mul(exact, _ROOT_OF_HALF).erf_().add_(1).mul_(0.5).mul_(exact).to(x.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation: transformers' ``gelu_new`` and ``gelu_pytorch_tanh``."""
    if not _needs_care(x):
        return functional.gelu(x, approximate="tanh")
    exact = x.float()
    inner = torch.mul(exact, exact).mul_(0.044715).add_(1).mul_(exact).mul_(_ROOT_OF_2_BY_PI)
    return inner.tanh_().add_(1).mul_(0.5).mul_(exact).to(x.dtype)


def _needs_care(x: Tensor) -> bool:
    return x.is_cpu and x.dtype is not torch.float64
