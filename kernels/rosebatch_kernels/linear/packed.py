"""The matrix product on a CPU with the weight kept in oneDNN's own blocked layout.

A plain call re-lays the weight every time: over the 30 layers of SmolLM2-135M in bf16 with AMX on two cores, 27 ms
for 32 rows against 17 ms (docs/performance.md).

``invariant=True`` makes a row's result independent of the rows beside it. The library picks its blocking, and with it
the order of the additions, by the number of rows; with the layout made for a single row, products of up to 128 rows
in bf16, and of any number but one in fp32, were found to give the same bits (tests/kernels/test_linear.py).
"""

import torch
from torch import Tensor
from torch.nn import functional

# The layout is chosen for this many rows: a decode batch, where the weight's layout decides.
_LAYOUT_ROWS = 32
_INVARIANT_LAYOUT_ROWS = 1
_INVARIANT_MOST_ROWS = {torch.bfloat16: 128}


def can_pack(weight: Tensor) -> bool:
    """Whether this PyTorch, device and dtype have a packed layout."""
    return (
        weight.device.type == "cpu"
        and weight.dtype in (torch.float32, torch.bfloat16)
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class PackedLinear:
    """``x [T, in] -> [T, out]`` with ``weight [out, in]`` and an optional ``bias [out]``; the weight is copied."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, invariant: bool = False) -> None:
        rows = _INVARIANT_LAYOUT_ROWS if invariant else _LAYOUT_ROWS
        self.weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), rows)
        self.bias = bias
        self.invariant = invariant

    def __call__(self, x: Tensor) -> Tensor:
        """The product plus the bias, in x's dtype."""
        return self._tiled(x, self.bias)

    def product(self, x: Tensor) -> Tensor:
        """The product alone."""
        return self._tiled(x, None)

    def _tiled(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if not self.invariant:
            return self._product(x, bias)
        if len(x) == 1:
            return self._product(functional.pad(x, (0, 0, 0, 1)), bias)[:1]
        most = _INVARIANT_MOST_ROWS.get(x.dtype, len(x))
        if len(x) <= most:
            return self._product(x, bias)
        return torch.cat([self._product(part, bias) for part in x.split(most)])

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, bias, "none", [], "")
        return out
