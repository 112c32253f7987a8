"""SiLU and GELU of a row are the same bits in any batch, where PyTorch's own are not."""

import pytest
import torch
from torch.nn import functional

from rosebatch_kernels.common.cpu_activations import gelu, gelu_tanh, silu

WIDTHS = (33, 96, 1537, 3072)


@pytest.mark.parametrize(
    ("function", "theirs"),
    [
        (silu, functional.silu),
        (gelu, functional.gelu),
        (gelu_tanh, lambda x: functional.gelu(x, approximate="tanh")),
    ],
)
def test_no_bit_depends_on_the_place(function, theirs):
    """A row alone, in a pair and in a batch; the gate is half of a wider tensor, as in a model."""
    torch.manual_seed(0)
    for width in WIDTHS:
        batch = torch.randn(257, 2 * width)[:, :width] * 3
        whole = function(batch)
        torch.testing.assert_close(whole, theirs(batch), rtol=2e-6, atol=2e-6)
        for row in range(0, 257, 51):
            for rows in (batch[row : row + 1], batch[row : row + 2]):
                assert torch.equal(function(rows), whole[row : row + len(rows)])


@pytest.mark.parametrize("function", [silu, gelu, gelu_tanh])
def test_extremes(function):
    """No value overflows into NaN."""
    x = torch.tensor([-1e38, -200.0, -0.0, 0.0, 200.0, 1e38])
    assert function(x).tolist() == [0.0, 0.0, 0.0, 0.0, 200.0, x[-1].item()]
