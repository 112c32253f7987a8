"""PyTorch reference of what adapters add to products by row (source: S-LoRA, arXiv 2311.03285)."""

import torch
from torch import Tensor

from rosebatch_kernels.adapters.layout import Rows, Stack
from rosebatch_kernels.common.order import Order
from rosebatch_kernels.mlp.reference import GATED


def sort_rows(adapters: Tensor, count: int) -> Rows:
    """The rows of a step, of ``count`` adapters; see ``Rows``. One tile holds all rows of an adapter."""
    ordered = torch.argsort(adapters, stable=True).to(torch.int32)
    places = torch.bincount(adapters, minlength=count + 1)
    first = places.cumsum(0) - places
    groups = torch.arange(count + 1, device=adapters.device)
    tiles = torch.stack((groups, first, places), 1).to(torch.int32)
    return Rows(adapters, Order(ordered, first.to(torch.int32), tiles, (groups + 1).to(torch.int32)), len(adapters))


def add_(out: Tensor, x: Tensor, stack: Stack, rows: Rows) -> Tensor:
    """``out + B A x`` of each row's adapter, in place; rows without one stay as they are.

    Args:
        out: ``[T, out]``, rows at any stride.
        x: ``[T, in]`` in out's dtype, rows at any stride.
        stack: of the adapters, in this dtype.
        rows: of the step.

    Returns:
        ``out``. ``A x`` is added up in fp32 and rounded to the dtype; so is the sum of ``B A x`` and ``out``.
    """
    ranks = stack.b.shape[2]
    for number in rows.adapters.unique().tolist():
        if not number:
            continue
        own = (rows.adapters == number).nonzero()[:, 0]
        y = (x[own].float() @ stack.a[number - 1].float().t()).to(x.dtype).float()
        for first, end, part in stack.columns.tolist():
            b = stack.b[number - 1, first:end].float()
            added = y[:, part * ranks : (part + 1) * ranks] @ b.t()
            out[own, first:end] = (out[own, first:end].float() + added).to(out.dtype)
    return out


def gated(gate_up: Tensor, x: Tensor, stack: Stack, rows: Rows, activation: str) -> Tensor:
    """``add_``, and then the gate's activation times the other half.

    Args:
        gate_up: ``[T, 2 · I]``, gate first; it may be overwritten.
        x, stack, rows: as of ``add_``; the stack is gated.
        activation: a name of ``rosebatch_kernels.mlp``, such as ``silu_mul``.

    Returns:
        ``[T, I]``.
    """
    return GATED[activation](add_(gate_up, x, stack, rows))
