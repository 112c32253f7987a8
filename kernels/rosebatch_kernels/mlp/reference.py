"""PyTorch reference of the MLP epilogues (source of the bias forms: article S0).

The forms that add a bias compute in fp32 and round once, like a product that adds its bias itself.
"""

import torch
from torch import Tensor
from torch.nn import functional

from rosebatch_kernels.common.cpu_activations import gelu, gelu_tanh, silu


def relu(x: Tensor) -> Tensor:
    """``max(x, 0)``."""
    return functional.relu(x)


ACTIVATIONS = {"gelu_erf": gelu, "gelu_tanh": gelu_tanh, "relu": relu}


def bias_gelu_erf_(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """``gelu(x + bias)`` written over ``x [T, I]``, which is returned; ``bias [I]``."""
    return x.copy_(gelu(_biased(x, bias)))


def bias_gelu_tanh_(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """``gelu_tanh(x + bias)`` written over ``x [T, I]``, which is returned; ``bias [I]``."""
    return x.copy_(gelu_tanh(_biased(x, bias)))


def bias_relu_(x: Tensor, bias: Tensor | None = None) -> Tensor:
    """``relu(x + bias)`` written over ``x [T, I]``, which is returned; ``bias [I]``."""
    return x.copy_(relu(_biased(x, bias)))


def bias_residual_(residual: Tensor, y: Tensor, bias: Tensor) -> Tensor:
    """``residual += y + bias`` in place, and ``residual`` returned: ``[T, H]``, ``[T, H]`` and ``[H]``."""
    return residual.copy_(residual.float() + (y.float() + bias.float()))


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` for ``gate_up [T, 2·I]``, gate first: ``[T, I]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return silu(gate).mul_(up)


def relu_mul(gate_up: Tensor) -> Tensor:
    """``relu(gate) * up`` for ``gate_up [T, 2·I]``, gate first: ``[T, I]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return functional.relu(gate).mul_(up)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """``gelu_tanh(gate) * up`` for ``gate_up [T, 2·I]``, gate first: ``[T, I]`` (Gemma)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_tanh(gate).mul_(up)


def gelu_erf_mul(gate_up: Tensor) -> Tensor:
    """``gelu(gate) * up`` for ``gate_up [T, 2·I]``, gate first: ``[T, I]``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate).mul_(up)


GATED = {"silu_mul": silu_mul, "relu_mul": relu_mul, "gelu_tanh_mul": gelu_tanh_mul, "gelu_erf_mul": gelu_erf_mul}


def sigmoid_mul(x: Tensor, gate: Tensor) -> Tensor:
    """``x · sigmoid(gate)`` of ``[T, I]`` each, rounded once; a gate ``[T, 1]`` counts for a whole row.

    By exp: unlike PyTorch's sigmoid, it gives the same bits at any place in a tensor.
    """
    return (x.float() / (1 + torch.exp(-gate.float()))).to(x.dtype)


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    return x.float() if bias is None else x.float() + bias.float()
