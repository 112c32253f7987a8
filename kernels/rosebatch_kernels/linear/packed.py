"""The matrix product on a CPU with the weight kept in oneDNN's own blocked layout.

A plain call re-lays the weight every time, which at decode sizes costs as much as the product itself: with
bf16 on AMX, 32 rows and a 576 x 3072 weight, 400 µs against 278 µs on two cores.
"""

import torch
from torch import Tensor

# The layout is chosen for this many rows: a decode batch, where the weight's layout decides.
_LAYOUT_ROWS = 32


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

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _LAYOUT_ROWS)
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        """The product, in x's dtype."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out
