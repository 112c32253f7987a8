"""Matrix products: right in every layout, and with ``invariant`` the same bits in any company."""

import pytest
import torch
from torch.nn.functional import pad

from rosebatch_kernels.linear.torch_linear import TorchLinear
from rosebatch_kernels.linear.torch_packed import PackedLinear, can_pack

ROWS = (1, 2, 3, 31, 32, 33, 100, 128, 129, 300, 1025)
# (in, out): odd ones, the smallest, and those of SmolLM2-135M, GPT-2 and the tests' tiny models.
SHAPES = [(1, 7), (63, 1000), (1000, 63), (48, 199), (64, 96), (576, 960), (1536, 576), (3072, 768)]
PACKED_DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=PACKED_DTYPES, ids=["float32", "bfloat16"])
def packed_dtype(request):
    if request.param == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU has no bf16 instructions")
    if not can_pack(torch.empty(1, 1, dtype=request.param)):
        pytest.skip("this PyTorch cannot pack weights")
    return request.param


def layer(randn, size_in, size_out, dtype):
    """Weight and bias of a size that keeps results around 1."""
    return (randn(size_out, size_in) * size_in**-0.5).to(dtype), randn(size_out, dtype=dtype)


def exact(x, weight, bias):
    out = x.double() @ weight.double().t()
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize(("size_in", "size_out"), SHAPES)
def test_linear(size_in, size_out, dtype, randn, assert_close):
    weight, bias = layer(randn, size_in, size_out, dtype)
    x = randn(33, size_in, dtype=dtype)
    for b in (bias, None):
        out = TorchLinear(weight, b)(x)
        assert out.dtype == dtype
        assert_close(out, exact(x, weight, b))


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(("size_in", "size_out"), SHAPES)
def test_packed_linear(size_in, size_out, invariant, packed_dtype, randn, assert_close):
    """Above and below the number of rows at which a product is split."""
    weight, bias = layer(randn, size_in, size_out, packed_dtype)
    for b in (bias, None):
        packed = PackedLinear(weight, b, invariant=invariant)
        for rows in (1, 2, 63, 129, 300):
            x = randn(rows, size_in, dtype=packed_dtype)
            out = packed(x)
            assert out.dtype == packed_dtype
            assert_close(out, exact(x, weight, b))


def test_packed_linear_of_strided_rows(packed_dtype, randn):
    weight, bias = layer(randn, 64, 96, packed_dtype)
    wide = randn(150, 200, dtype=packed_dtype)
    for invariant in (False, True):
        packed = PackedLinear(weight, bias, invariant=invariant)
        for x in (wide[:, 7:71], wide[::3, :64], wide[:1, :64]):
            assert torch.equal(packed(x), packed(x.clone(memory_format=torch.contiguous_format)))


def test_packed_linear_leaves_the_weight_alone(packed_dtype, randn):
    """It takes a copy: embedding and output projection may be the same tensor."""
    weight, _ = layer(randn, 64, 96, packed_dtype)
    before = weight.clone()
    packed = PackedLinear(weight, None, invariant=True)
    x = randn(3, 64, dtype=packed_dtype)
    out = packed(x)
    assert torch.equal(weight, before)
    weight.zero_()
    assert torch.equal(packed(x), out)


@pytest.mark.parametrize(("size_in", "size_out"), SHAPES)
def test_a_rows_bits_do_not_depend_on_the_rows_beside_it(size_in, size_out, packed_dtype, randn):
    weight, bias = layer(randn, size_in, size_out, packed_dtype)
    x = randn(max(ROWS), size_in, dtype=packed_dtype)
    for b in (bias, None):
        packed = PackedLinear(weight, b, invariant=True)
        whole = packed(x)
        for rows in ROWS:
            assert torch.equal(packed(x[:rows].clone()), whole[:rows]), rows
            assert torch.equal(packed(x[-rows:].clone()), whole[-rows:]), rows
        # Each alone, and other neighbours in another order.
        alone = torch.cat([packed(x[i : i + 1]) for i in range(0, len(x), 41)])
        assert torch.equal(alone, whole[::41])
        assert torch.equal(packed(x.flip(0)[:77]), whole.flip(0)[:77])


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("size_in", "size_out"), [(63, 1000), (576, 960), (1536, 576)])
def test_a_rows_bits_do_not_depend_on_the_number_of_threads_shared_with(size_in, size_out, packed_dtype, randn):
    """How the work is divided among threads must not decide the order of the additions either."""
    weight, bias = layer(randn, size_in, size_out, packed_dtype)
    x = randn(129, size_in, dtype=packed_dtype)
    packed = PackedLinear(weight, bias, invariant=True)
    whole = packed(x)
    for rows in (1, 2, 33, 128):
        assert torch.equal(packed(x[:rows].clone()), whole[:rows]), rows


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(("size_in", "size_out"), [(576, 576), (3072, 768), (3201, 512), (8192, 512)])
def test_the_order_of_the_additions_does_not_depend_on_the_rows(size_in, size_out, packed_dtype, randn):
    """Sums that are zero but for rounding show another order in each of them; other sums in one of some thousand."""
    half, weight = randn(150, size_in // 2, dtype=packed_dtype), randn(size_out, size_in // 2, dtype=packed_dtype)
    x = pad(torch.cat([half, -half], dim=1), (0, size_in % 2))
    packed = PackedLinear(pad(torch.cat([weight, weight], dim=1), (0, size_in % 2)), None, invariant=True)
    whole = packed(x)
    for rows in (1, 2, 15, 16, 17, 31, 40, 64, 65, 100, 128):
        assert torch.equal(packed(x[:rows]), whole[:rows]), rows


def test_only_what_can_be_packed_is():
    assert not can_pack(torch.empty(4, 4, dtype=torch.float16))
    assert not can_pack(torch.empty(4, 4, dtype=torch.float64))
    assert not can_pack(torch.empty(4, 4, device="meta"))


def test_bf16_is_packed_only_where_onednn_has_it(monkeypatch):
    """A CPU without AVX-512 ended a bf16 run at load: oneDNN refuses the layout there."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert not can_pack(torch.empty(4, 4, dtype=torch.bfloat16))
    assert can_pack(torch.empty(4, 4)) == hasattr(torch.ops.mkldnn, "_linear_pointwise")
