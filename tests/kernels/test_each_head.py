"""Products of each head with a matrix of its own against float64."""

from functools import partial

import pytest
import torch

from rosebatch_kernels.common.device import device_of
from rosebatch_kernels.linear.each_head import ApartHeads, BatchedHeads
from rosebatch_kernels.linear.fixed_heads import FixedHeads
from rosebatch_kernels.linear.torch_linear import TorchLinear

pytestmark = pytest.mark.usefixtures("poisoned_outputs")


def apart(weight):
    return ApartHeads([TorchLinear(own) for own in weight])


IMPLEMENTATIONS = {
    "reference": apart,
    "batched": BatchedHeads,
    "kernel": partial(FixedHeads, device=device_of(torch.device("cuda"))),
}


@pytest.fixture(params=IMPLEMENTATIONS)
def make(request, device):
    """Products of matrices ``[heads, out, in]``; PyTorch's need no interpreter."""
    return IMPLEMENTATIONS[request.param]


@pytest.mark.parametrize(
    ("tokens", "heads", "size_in", "size_out"), [(1, 3, 20, 40), (33, 2, 128, 70), (70, 4, 40, 18)]
)
@pytest.mark.parametrize("given", [False, True])
def test_each_head(make, tokens, heads, size_in, size_out, given, dtype, device, randn, assert_close):
    """Odd sizes; parts of wider rows are read and written, and nothing beside them."""
    x = randn(tokens, heads, size_in + 3, dtype=dtype).to(device)
    weight = (randn(heads, size_out, size_in) * size_in**-0.5).to(device, dtype)
    wide = torch.full((tokens, heads, size_out + 5), 7.0, dtype=dtype, device=device)
    out = make(weight)(x[..., :size_in], wide[..., :size_out] if given else None)
    assert_close(out, torch.einsum("thi,hoi->tho", x[..., :size_in].double(), weight.double()).cpu())
    if given:
        assert out.data_ptr() == wide.data_ptr()
        assert (wide[..., size_out:] == 7).all()


def test_no_other_row_changes_bits(dtype, device, randn):
    """A tile that went by the number of rows would add up its depth in another order."""
    x, weight = randn(100, 2, 130, dtype=dtype).to(device), randn(2, 40, 130, dtype=dtype).to(device)
    products = IMPLEMENTATIONS["kernel"](weight)
    whole = products(x)
    for count in (1, 17, 64):
        assert torch.equal(products(x[:count]), whole[:count])
