"""PyTorch reference of the MLP epilogues (source: article S0 for the bias forms)."""

from torch import Tensor
from torch.nn import functional


def gelu(x: Tensor) -> Tensor:
    """Exact GELU of ``x``, by the error function."""
    return functional.gelu(x)


def gelu_tanh(x: Tensor) -> Tensor:
    """GELU by its tanh approximation: transformers' ``gelu_new`` and ``gelu_pytorch_tanh``."""
    return functional.gelu(x, approximate="tanh")


def relu(x: Tensor) -> Tensor:
    """``max(x, 0)``."""
    return functional.relu(x)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` for ``gate_up [T, 2·I]``, gate first: ``[T, I]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.silu(gate).mul_(up)
