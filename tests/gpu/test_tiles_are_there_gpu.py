"""Tensor cores read the tiles that were loaded, and their sums are read when they are there."""

import pytest
import torch

from rosebatch_kernels.common.device import device_of
from rosebatch_kernels.linear import kernel, sizes
from rosebatch_kernels.mlp import kernel as mlp

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", [(2304, 768), (3072, 576), (6144, 1024)], ids=str)
@pytest.mark.parametrize("rows", [8, 33, 48, 64])
def test_a_product_with_a_gate_again_and_again(rows, shape, dtype):
    """54 of 60 launches had wrong elements, and once all of them: 48 rows of SmolLM-135M's MLP in fp16, on an H200."""
    device, generator = device_of(torch.device("cuda")), torch.Generator().manual_seed(0)
    x = torch.randn(rows, shape[1], generator=generator).to("cuda", dtype)
    weight = (torch.randn(shape, generator=generator) * shape[1] ** -0.5).to("cuda", dtype)
    product = sum(x.double()[:, k : k + 1] * weight.double()[:, k] for k in range(shape[1])).to(dtype)
    expected = mlp.silu_mul(product, sizes=mlp.SIZES.of(device), device=device)
    for _ in range(50):
        out = kernel.linear(x, weight, None, "silu_mul", sizes=sizes.SIZES.of(device), device=device)
        torch.testing.assert_close(out, expected, rtol=0.02, atol=0.02)
