"""Products of few rows, and what follows them in the same kernel, against float64."""

import pytest
import torch

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.device import INTERPRETER, Device
from rosebatch_kernels.linear import gated as gated_module
from rosebatch_kernels.linear import head as head_module
from rosebatch_kernels.linear import reference
from rosebatch_kernels.linear.streamed import StreamedHead, StreamedLinear, can_stream

kernel, head_kernel = Launchers("linear.kernel"), Launchers("linear.head")
IMPLEMENTATIONS = {"reference": reference, "kernel": kernel}
gated = Launchers("linear.gated").gated
logits, can_stream_head = head_kernel.logits, head_kernel.can_stream_head

# (rows, in, out): one row; none a multiple of a tile; more rows than a tile has, only in parts; the depth in parts that
# come out uneven, and in as many as there can be.
SHAPES = [(1, 64, 32), (7, 200, 48), (33, 1000, 100), (64, 768, 33), (17, 1, 1), (16, 2048, 1024)]
MANY = [(65, 300, 40), (128, 1024, 64)]
ACTIVATIONS = {
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "gelu_erf": torch.nn.functional.gelu,
    "relu": torch.relu,
    "gelu_tanh_mul": lambda x: torch.nn.functional.gelu(x.chunk(2, -1)[0], approximate="tanh") * x.chunk(2, -1)[1],
    "silu_mul": lambda x: torch.nn.functional.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
    "relu_mul": lambda x: torch.relu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
}
pytestmark = pytest.mark.usefixtures("poisoned_outputs")


def make(shape, dtype, device, randn):
    """x with rows that lie apart, weight and bias of a size that keeps results around 1."""
    rows, size_in, size_out = shape
    x = randn(rows, size_in + 8, dtype=dtype).to(device)[:, :size_in]
    weight = (randn(size_out, size_in) * size_in**-0.5).to(device, dtype)
    return x, weight, randn(size_out, dtype=dtype).to(device)


def exact(x, weight, bias=None):
    out = x.double() @ weight.double().t()
    return out if bias is None else out + bias.double()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_linear(implementation, shape, biased, narrow, device, randn, assert_close):
    x, weight, bias = make(shape, narrow, device, randn)
    out = implementation.linear(x, weight, bias if biased else None)
    assert out.dtype == narrow
    assert_close(out, exact(x, weight, bias if biased else None))


@pytest.mark.parametrize("shape", [(7, 200, 48), (64, 64, 70)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activated(implementation, shape, biased, activation, narrow, device, randn, assert_close):
    """A gate and what it gates lie half the weight apart, and are rounded before they are multiplied."""
    x, weight, bias = make(shape, narrow, device, randn)
    out = implementation.linear(x, weight, bias if biased else None, activation)
    assert_close(out, ACTIVATIONS[activation](exact(x, weight, bias if biased else None)))


@pytest.mark.parametrize("shape", SHAPES + MANY)
def test_parts(implementation, shape, narrow, device, randn):
    """fp32 until they are added up: no rounding to 16 bits hides in them."""
    x, weight, _ = make(shape, narrow, device, randn)
    out = implementation.parts(x, weight)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.sum(0).double(), exact(x, weight), rtol=0, atol=1e-5)


def test_parts_are_as_many_as_fill_a_gpu(device, randn):
    for shape, splits in [((16, 2048, 1024), 8), ((16, 256, 1024), 2), ((128, 1024, 64), 4), ((2, 128, 128), 1)]:
        x, weight, _ = make(shape, torch.float16, "cpu", randn)
        assert len(kernel.parts(x.to(device), weight.to(device))) == splits


@pytest.mark.parametrize("rows", [1, 16, 64])
def test_a_rows_bits_do_not_depend_on_its_neighbours(rows, device, randn):
    """A tile always has as many rows; those that are not there are zeros."""
    x, weight, bias = make((64, 200, 48), torch.float16, device, randn)
    whole = kernel.linear(x, weight, bias)
    assert torch.equal(kernel.linear(x[:rows], weight, bias), whole[:rows])


@pytest.mark.xdist_group("large_memory")
def test_weight_offsets_past_int32(device, randn, assert_close):
    """Rows whose end lies 2^31 elements behind the weight's beginning; the rows before are never touched."""
    if device == "cpu":
        pytest.skip("half a million rows take the interpreter hours")
    size_in = 2**12
    rows = 2**19 + 2
    storage = torch.UntypedStorage(rows * size_in * 2, device=device)
    weight = torch.empty(0, dtype=torch.float16, device=device).set_(storage, 0, (rows, size_in))
    weight[-64:] = (randn(64, size_in) * size_in**-0.5).half().to(device)
    x = randn(2, size_in, dtype=torch.float16).to(device)
    assert_close(kernel.linear(x, weight)[:, -64:], exact(x, weight[-64:]))


def test_which_rows_are_streamed(device, randn, assert_close):
    """More rows, or a weight that takes long to read anyway, are left to the library, with the same results."""
    x, weight, bias = make((200, 64, 32), torch.float16, device, randn)
    assert can_stream(weight, Device.of_arch(90, 132))
    assert not can_stream(weight, Device.of_arch(89, 128)), "99 KB of shared memory"
    assert not can_stream(weight.float(), Device.of_arch(90, 132))
    layer = StreamedLinear(weight, bias, INTERPRETER)
    assert [(layer.streams(x[:n]), layer.divides(x[:n])) for n in (64, 65, 129)] == [
        (True, True),
        (False, True),
        (False, False),
    ]
    large = StreamedLinear(torch.empty(2**10, 2**13 + 1, dtype=torch.float16), None, INTERPRETER)
    assert not large.streams(x[:1])
    assert not large.divides(x[:1])
    for n in (64, 200):
        assert_close(layer(x[:n]), exact(x[:n], weight, bias))
        assert_close(layer.product(x[:n]), exact(x[:n], weight))
        assert layer.activates(x[:n], "gelu_tanh")
        assert_close(layer.activated(x[:n], "gelu_tanh"), ACTIVATIONS["gelu_tanh"](exact(x[:n], weight, bias)))
        for gate in ("silu_mul", "relu_mul"):
            assert layer.activates(x[:n], gate) == (n == 64)
    assert_close(layer.activated(x[:64], "relu_mul"), ACTIVATIONS["relu_mul"](exact(x[:64], weight, bias)))


# (rows, in, out): less than a tile; no side a multiple of a tile; more tiles than programs; the shape of a small model.
@pytest.mark.parametrize("shape", [(1, 64, 16), (130, 72, 400), (700, 200, 528), (2048, 1024, 6144)])
@pytest.mark.parametrize("activation", ["silu_mul", "relu_mul", "gelu_tanh_mul"])
def test_gated(shape, activation, narrow, device, randn, assert_close):
    """Past the weight's first half, a tile of the gate must not read up's rows; nor may a tile write past its rows."""
    if device == "cpu" and shape[0] > 1000:
        pytest.skip("the interpreter takes a minute")
    x, weight, _ = make(shape, narrow, device, randn)
    out = gated(x.contiguous(), weight, activation)
    assert out.dtype == narrow
    assert_close(out, ACTIVATIONS[activation](exact(x, weight)))


def test_gated_rows_bits_do_not_depend_on_their_neighbours(device, randn):
    """A program's tiles follow one another, so a sum that is not cleared would show in the next tile."""
    x, weight, _ = make((700, 200, 528), torch.float16, device, randn)
    x = x.contiguous()
    whole = gated(x, weight, "silu_mul")
    for first, rows in [(0, 1), (128, 128), (640, 60)]:
        assert torch.equal(gated(x[first : first + rows], weight, "silu_mul"), whole[first : first + rows])


def test_which_products_are_gated(randn):
    """Few rows, a bias, large weights, and what TMA cannot load are left to cuBLAS."""
    rows = gated_module.SIZES.measured.min_rows
    x, weight, bias = make((rows, 64, 32), torch.float16, "cpu", randn)
    x = x.contiguous()
    assert StreamedLinear(weight, None, INTERPRETER).activates(x, "silu_mul")
    assert not StreamedLinear(weight, None, INTERPRETER).activates(x, "gelu_tanh")
    assert not StreamedLinear(weight, None, INTERPRETER).activates(x[1:], "silu_mul")
    assert not StreamedLinear(weight, bias, INTERPRETER).activates(x, "silu_mul")
    assert not StreamedLinear(weight[:, :60].contiguous(), None, INTERPRETER).activates(
        x[:, :60].contiguous(), "silu_mul"
    )
    assert not StreamedLinear(weight[:24], None, INTERPRETER).activates(x, "silu_mul")
    assert not StreamedLinear(weight, None, INTERPRETER).activates(x.repeat(1, 2)[:, :64], "silu_mul")
    large = torch.empty(2**13, 2**11, dtype=torch.float16)
    assert not StreamedLinear(large, None, INTERPRETER).activates(
        torch.empty(rows, 2**11, dtype=torch.float16), "silu_mul"
    )


# (rows, in, out): no side a multiple of a tile; each size of a tile; more tiles than programs.
@pytest.mark.parametrize("shape", [(1, 64, 64), (7, 72, 200), (17, 200, 1000), (33, 128, 640), (64, 1024, 50304)])
def test_logits(shape, narrow, device, randn, assert_close):
    """Rows of x that a tile has too many are neither read as others' nor written."""
    if device == "cpu" and shape[2] > 10000:
        pytest.skip("the interpreter takes a minute")
    x, weight, _ = make(shape, narrow, device, randn)
    out = logits(x.contiguous(), weight)
    assert out.dtype == narrow
    assert_close(out, exact(x, weight))


def test_which_heads_are_streamed(device, randn, assert_close):
    """A head of 1000 rows is padded; many rows, and what TMA cannot load, are left to cuBLAS."""
    rows = head_module.SIZES.measured.max_rows
    x, weight, _ = make((rows + 1, 64, 1000), torch.float16, device, randn)
    x = x.contiguous()
    head = StreamedHead(weight, INTERPRETER)
    assert can_stream_head(x[1:], head.weight)
    assert not can_stream_head(x, head.weight)
    assert not can_stream_head(x[:3, :60].contiguous(), head.weight[:, :60].contiguous())
    assert not can_stream_head(x.repeat(1, 2)[:3, :64], head.weight)
    for part in (x, x[1:], x[:1]):
        assert head(part).shape == (len(part), 1000)
        assert_close(head(part), exact(part, weight))
