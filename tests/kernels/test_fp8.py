"""fp8 products and the rounding before them: bytes equal the reference's, sums equal float64's."""

import pytest
import torch

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.device import INTERPRETER, Device
from rosebatch_kernels.fp8 import reference
from rosebatch_kernels.fp8.carried import left
from rosebatch_kernels.fp8.fp8_linear import Fp8Linear, by_pytorch
from rosebatch_kernels.fp8.sizes import SIZES, share_of_parts
from tests.helpers.interpreter import add_up_exactly

kernel, rows_kernel = Launchers("fp8.kernel"), Launchers("fp8.quantize")
IMPLEMENTATIONS = {"reference": reference, "kernel": kernel}
mlp, norm = Launchers("mlp.kernel"), Launchers("norm.kernel")
E4M3 = torch.float8_e4m3fn
# All numbers, in order, and what lies between them.
NUMBERS = torch.arange(127, dtype=torch.uint8).view(E4M3).double()
# One group and several, cut off or not; one tile and several, and rows that share one.
ROWS = [(1, 16), (3, 64), (5, 200), (70, 128), (2, 576), (2, 3000)]
# (rows, in, out): one row; no side a multiple of a tile; blocks that are cut off; each height of a tile; parts.
SHAPES = [(1, 64, 32), (7, 208, 48), (33, 576, 576), (64, 2048, 256), (17, 1024, 64), (70, 400, 144)]
pytestmark = pytest.mark.usefixtures("poisoned_outputs")


@pytest.fixture(params=[0, 128], ids=["rows", "blocks"])
def group(request):
    return request.param


def quantize(implementation, x, group):
    """Numbers and scales by the reference, or by the kernel."""
    return reference.quantize(x, group) if implementation is reference else rows_kernel.quantize(x, group)[:2]


def same_bits(a, b):
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def weight_of(shape, group, randn, device):
    """Numbers ``[out, in]``, scales that all differ, and the values."""
    numbers = randn(*shape).to(E4M3)
    if group:
        scales = randn(-(-shape[0] // 128), -(-shape[1] // 128)).abs() + 0.1
        each = scales.repeat_interleave(128, 0)[: shape[0]].repeat_interleave(128, 1)[:, : shape[1]]
    else:
        scales = randn(shape[0]).abs() + 0.1
        each = scales[:, None]
    return numbers.to(device), scales.to(device), (numbers.double() * each.double()).to(device)


def values_of(numbers, scales, group):
    width = group or numbers.shape[1]
    return numbers.double() * scales.t().double().repeat_interleave(width, 1)[:, : numbers.shape[1]]


def require_sums(found, x, weight):
    """Hopper adds up 128 products at a time in some 14 bits, so a sum may lose a share of its terms' sizes."""
    exact, sizes = x @ weight.t(), x.abs() @ weight.abs().t()
    lost, allowed = (2**-12 * sizes, 0.0) if found.is_cuda else (1e-5 * exact.abs(), 1e-5)
    assert ((found.double() - exact).abs() <= lost + allowed).all()


def require_nearest(x, numbers, scales, group):
    """Each quotient in fp32 is rounded to the nearest number, of two that are as near to the even one."""
    quotients = (x.float() / scales.t().repeat_interleave(group or x.shape[1], 1)[:, : x.shape[1]]).double()
    place = torch.bucketize(quotients.abs(), (NUMBERS[1:] + NUMBERS[:-1]) / 2)
    tie = (NUMBERS[place] + NUMBERS[(place + 1).clamp(max=126)]) / 2 == quotients.abs()
    place += (tie & (place % 2 == 1)).long()
    assert torch.equal(numbers.double(), NUMBERS[place].copysign(quotients))


@pytest.mark.parametrize("shape", ROWS)
def test_quantize(implementation, shape, group, narrow, device, randn):
    """The largest of a row becomes 448, each other one the nearest number; rows lie apart."""
    x = (randn(shape[0], shape[1] + 8) * 3).to(narrow)
    x[0, : shape[1]] *= 1e-3
    numbers, scales = (each.cpu() for each in quantize(implementation, x.to(device)[:, : shape[1]], group))
    x = x[:, : shape[1]]
    width = group or shape[1]
    amax = torch.stack([each.float().abs().amax(1) for each in x.split(width, 1)])
    least = 1e-10 / 448 if group else 1 / (448 * 512)
    assert torch.equal(scales, (amax / 448).clamp(min=least))
    assert numbers.dtype == E4M3 and numbers.is_contiguous() and scales.is_contiguous()
    require_nearest(x, numbers, scales, group)


@pytest.mark.parametrize("step", [2.0**-12, 2.0**-6, 0.25])
def test_midpoints_go_to_the_even_number(implementation, group, step, device):
    """With a reciprocal in place of a division, some go the other way; and below 2**-6 numbers are subnormal."""
    x = (torch.arange(-960, 960).view(15, 128) * step).clamp(-448, 448)
    x[:, 0] = 448.0
    numbers, scales = (each.cpu() for each in quantize(implementation, x.half().to(device), group))
    assert torch.equal(scales, torch.ones(1, 15))
    require_nearest(x.half(), numbers, scales, group)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_rows_of_zeros_and_of_numbers_that_are_none(implementation, group, device):
    """Zeros were divided by zero; NaN or infinity that became a number would be an answer in place of an error."""
    x = torch.ones(4, 256, dtype=torch.float16)
    x[0] = 0.0
    x[1, 3], x[2, 200] = float("nan"), float("inf")
    numbers, scales = (each.cpu() for each in quantize(implementation, x.to(device), group))
    assert not numbers[0].float().any() and scales[:, 0].isfinite().all()
    assert numbers[1].float().isnan().any() and numbers[2].float().isnan().any()
    assert torch.equal(numbers[3].float(), torch.full((256,), 448.0))


@pytest.mark.parametrize("shape", ROWS)
def test_kernel_and_reference_have_the_same_bytes(shape, group, narrow, device, randn):
    x = randn(*shape, dtype=narrow).to(device)
    expected, found = reference.quantize(x, group), rows_kernel.quantize(x, group)
    assert same_bits(found.numbers, expected[0])
    assert torch.equal(found.scales, expected[1])


@pytest.mark.parametrize("kind", ["silu_mul", "relu_mul", "gelu_tanh_mul", "gelu_erf_mul"])
@pytest.mark.parametrize("shape", ROWS)
def test_gated(kind, shape, group, narrow, device, randn):
    """The form is what anybody would make of the result of the gate's own kernel."""
    x = randn(shape[0], 2 * shape[1] + 8, dtype=narrow).to(device)[:, : 2 * shape[1]]
    out, expected = rows_kernel.gated(x, kind, group), getattr(mlp, kind)(x)
    assert (out.shape, out.dtype) == (expected.shape, narrow)
    form, (numbers, scales) = left(out, group), reference.quantize(expected, group)
    assert same_bits(form.numbers, numbers) and torch.equal(form.scales, scales)
    assert left(out, 128 - group) is None, "scales of another kind"
    assert left(out[:1], group) is None, "other rows"
    with pytest.raises(AssertionError):
        # A view has neither form nor values: rounding it would be an answer.
        rows_kernel.quantized(out[:1], group)
    assert rows_kernel.quantized(out, group) is form


NORMS = {
    "layer_norm": lambda x, w, **own: norm.layer_norm(x, w, w, 1e-6, **own),
    "rms_norm": lambda x, w, **own: norm.rms_norm(x, w, 1e-6, **own),
    "add_layer_norm": lambda x, w, **own: norm.add_layer_norm(x, x, w, None, 1e-6, **own)[0],
    "add_rms_norm": lambda x, w, **own: norm.add_rms_norm(x[None].float(), x, w.float(), 1e-6, w, **own)[0],
    "add_post_norm": lambda x, w, **own: norm.add_post_norm(x, x, w, w, 1e-6, **own)[0],
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("shape", ROWS)
def test_norms_leave_what_anybody_would_make_of_them(name, shape, group, narrow, device, randn, assert_close):
    """Rounded values make the form: without rounding, a tenth of the numbers were others."""
    x, weight = randn(*shape, dtype=narrow).to(device), randn(shape[1], dtype=narrow).to(device)
    out = NORMS[name](x, weight, group=group)
    # The compiler may add a product without rounding it, in one form of the kernel and not in the other.
    assert_close(out, NORMS[name](x, weight).double())
    form, (numbers, scales) = left(out, group), reference.quantize(out, group)
    assert same_bits(form.numbers, numbers) and torch.equal(form.scales, scales)


def test_what_norms_leave_alone(group, device, randn):
    """Heads, and sums without a norm, are multiplied by nothing."""
    x, weight = randn(3, 2, 64, dtype=torch.float16).to(device), randn(64, dtype=torch.float16).to(device)
    assert left(norm.rms_norm(x, weight, 1e-6, group=group), group) is None
    assert left(norm.add_post_norm(x[0], x[1], weight, None, 1e-6, group=group)[0], group) is None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_product(implementation, shape, group, biased, narrow, device, randn, assert_close):
    rows, size_in, size_out = shape
    weight, scales, values = weight_of((size_out, size_in), group, randn, device)
    numbers, x_scales = reference.quantize((randn(rows, size_in) * size_in**-0.5).to(device, narrow), group)
    bias = randn(size_out, dtype=narrow).to(device) if biased else None
    out = implementation.linear(numbers, x_scales, weight, scales, bias, narrow)
    x = values_of(numbers, x_scales, group)
    exact = x @ values.t()
    assert out.dtype == narrow
    assert_close(out, exact if bias is None else exact + bias.double())
    parts = implementation.parts(numbers, x_scales, weight, scales)
    assert parts.dtype == torch.float32
    require_sums(parts.sum(0), x, values)


@pytest.mark.thorough
@pytest.mark.parametrize(("rows", "size_in"), [(16, 8192), (128, 8192), (16, 14336)])
def test_nothing_is_lost_of_long_sums(rows, size_in, group, narrow, device, randn):
    """Hopper's matrix instruction adds up in 14 bits: 15 % of 8192 positive products were lost, evenly."""
    size_out = 256 if device == "cuda" else 64
    rows = rows if device == "cuda" else 16
    x = (torch.rand(rows, size_in) + 0.5).to(device, narrow)
    weight = (torch.rand(size_out, size_in) + 0.5).to(E4M3).to(device)
    shape = (-(-size_out // 128), -(-size_in // 128)) if group else (size_out,)
    layer = Fp8Linear(weight, torch.ones(shape, device=device), None, INTERPRETER if device == "cpu" else hopper())
    numbers, x_scales = reference.quantize(x, group)
    exact = values_of(numbers, x_scales, group) @ weight.double().t()
    rounding = torch.finfo(narrow).eps / 2 if narrow == torch.bfloat16 else 0.0
    found = [(layer.parts(x).sum(0), 1e-3), (layer(x), 1e-3 + rounding)]
    if layer.has_scales(x):
        product, scales = layer.unscaled(x)
        found.append((product.double() * scales.rows[:, None] * scales.columns, 1e-3 + rounding))
    for out, allowed in found:
        assert ((out.double() - exact) / exact).abs().max() < allowed


def hopper():
    return Device.of_arch(90, 132)


@pytest.mark.thorough
@pytest.mark.parametrize("rows", [1, 64, 65, 300])
def test_layer(rows, group, narrow, device, randn, assert_close):
    """Few rows and many, by our kernel and PyTorch's, with what the input's producer left and without."""
    weight, scales, values = weight_of((256, 512), group, randn, device)
    bias = randn(256, dtype=narrow).to(device)
    layer = Fp8Linear(weight, scales, bias, INTERPRETER if device == "cpu" else hopper())
    rows = min(rows, 130) if device == "cpu" else rows
    gate_up = (randn(rows, 1024) / 8).to(device, narrow)
    x, gated = mlp.silu_mul(gate_up), rows_kernel.gated(gate_up, "silu_mul", group)
    some = values_of(*reference.quantize(x, group), group)
    exact = some @ values.t()
    assert_close(layer.product(x), exact)
    assert_close(layer(x), exact + bias.double())
    assert torch.equal(layer.product(x), layer.product(gated))
    assert layer.divides(x) == (rows <= SIZES.measured.max_rows_in_parts)
    if layer.divides(x):
        require_sums(layer.parts(x).sum(0), some, values)
    assert not layer.activates(x, "silu_mul") and not layer.adds_in_place(x)
    assert layer.has_scales(x) == (not group and narrow == torch.bfloat16 and rows > SIZES.measured.max_rows)
    if layer.has_scales(x):
        product, scales = layer.unscaled(x)
        assert product.dtype == narrow
        assert_close((product.double() * scales.rows[:, None] * scales.columns).to(narrow), exact)


def test_many_rows_by_pytorch(randn, assert_close):
    """In bf16, by rows; the scales of rows and columns are not exchanged. PyTorch has none by blocks on a CPU."""
    weight, scales, values = weight_of((48, 64), 0, randn, "cpu")
    x, bias = randn(100, 64, dtype=torch.bfloat16), randn(48, dtype=torch.bfloat16)
    layer = Fp8Linear(weight, scales, bias, INTERPRETER)
    exact = values_of(*reference.quantize(x), 0) @ values.t()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("rosebatch_kernels.fp8.fp8_linear.kernel", None)
        assert_close(layer.product(x), exact)
        assert_close(layer(x), exact + bias.double())


@pytest.mark.parametrize("rows", [96, 100])
def test_many_rows_of_blocks_by_pytorch(rows, randn, assert_close, monkeypatch):
    """cuBLAS refuses rows that are no multiple of 8, and other strides of scales. A CPU has no such product."""
    weight, scales, values = weight_of((256, 512), 128, randn, "cpu")

    def product(x, own, x_scales, own_scales, bias, *, out_dtype, use_fast_accum):
        assert len(x) % 8 == 0 and x.is_contiguous() and own.t().is_contiguous()
        assert x_scales.shape == (len(x), 4) and x_scales.stride() == (1, len(x))
        assert own_scales.shape == (4, 2) and own_scales.stride() == (1, 4)
        assert bias is None and not use_fast_accum
        return reference.linear(x, x_scales.t(), own.t(), own_scales.t(), None, out_dtype)

    monkeypatch.setattr(torch, "_scaled_mm", product)
    numbers, x_scales = reference.quantize(randn(rows, 512, dtype=torch.bfloat16), 128)
    out = by_pytorch(numbers, x_scales, weight, scales, None, torch.bfloat16)
    assert_close(out, values_of(numbers, x_scales, 128) @ values.t())


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_rows_bits_do_not_depend_on_its_neighbours(rows, group, device, randn):
    """Rows of one tile; those that are not there are zeros."""
    weight, scales, _ = weight_of((144, 400), group, randn, device)
    numbers, x_scales = reference.quantize(randn(64, 400, dtype=torch.float16).to(device), group)
    whole = kernel.linear(numbers, x_scales, weight, scales, None, torch.float16)
    some = numbers[:rows], x_scales[:, :rows].contiguous()
    assert torch.equal(kernel.linear(*some, weight, scales, None, torch.float16), whole[:rows])


@pytest.mark.thorough
def test_one_order_of_sums_for_all_numbers_of_rows(group, narrow, device, randn, monkeypatch):
    """With ``--batch-invariant``: few rows were added up in parts, many by cuBLAS. Sums are zero but for rounding.

    Each 128 columns are 32 times smaller than those before. A tensor core gives some 14 bits of their sum, and fp32
    would add up such sums exactly if they were of one size.
    """
    if device == "cpu":
        add_up_exactly(monkeypatch)
    weight, scales, _ = weight_of((144, 512), group, randn, device)
    weight, scales = weight.repeat(1, 2), scales.repeat(1, 2) if group else scales
    sizes = 2.0 ** (-5 * (torch.arange(512) // 128))
    half = (randn(140, 512) * sizes).to(device, narrow)
    x = torch.cat([half, -half], 1)
    layer = Fp8Linear(weight, scales, None, INTERPRETER if device == "cpu" else hopper())

    def of_rows(layer, rows):
        own = x[:rows]
        if layer.has_scales(own):
            product, factors = layer.unscaled(own)
            return (product.float() * factors.rows[:, None] * factors.columns).to(narrow)
        return layer.parts(own).sum(0).to(narrow) if layer.divides(own) else layer(own)

    def is_invariant(layer):
        whole = of_rows(layer, 140)
        return all(torch.equal(of_rows(layer, n), whole[:n]) for n in (1, 20, 40, 70, 130))

    assert is_invariant(layer.in_one_order()) and not is_invariant(layer)


def test_parts_fill_a_gpu():
    """Those of Llama-8B's layer, and no part of a small one is empty."""
    sizes = SIZES.measured
    shares = [share_of_parts(1, out, size_in, sizes=sizes) for out, size_in in ((4096, 4096), (4096, 14336), (64, 640))]
    assert shares == [1024, 3584, 640]
    assert share_of_parts(1, 64, 1152, sizes=sizes) == 640
