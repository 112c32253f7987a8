"""Products of experts whose weights stay quantized: their codes, exact sums, and float64 of their values."""

import pytest
import torch
import triton
import triton.language as tl

from benchmarks.kernels.launchers import Launchers
from rosebatch_kernels.common.device import INTERPRETER, Device, device_of
from rosebatch_kernels.experts import reference
from rosebatch_kernels.experts.codes import code_of, numbers, scale_of_e2m1
from rosebatch_kernels.experts.packed import CHUNK, MAX_EXPONENT, Packed
from rosebatch_kernels.experts.sizes import SIZES
from rosebatch_kernels.fp8 import reference as fp8
from tests.helpers.interpreter import add_up_exactly
from tests.helpers.packed_experts import FORMS, random_packed, values_of
from tests.kernels.test_experts import exact_parts
from tests.model.quantization.numbers import E2M1

kernel, rows_kernel = Launchers("experts.kernel"), Launchers("fp8.quantize")
pytestmark = pytest.mark.usefixtures("poisoned_outputs")
# (tokens, experts, experts of a token, H, I): a chunk and its half, less than a piece, an odd number of columns.
SHAPES = [(5, 3, 2, 192, 24), (1, 2, 1, 33, 130), (70, 3, 2, 136, 80)]
ALL_WORDS = 1 << 16


def to(packed, device):
    moved = (None if each is None else each.to(device) for each in (packed.words, packed.scales, packed.zeros))
    words, scales, zeros = moved
    return Packed(packed.form, packed.columns, words, packed.unit, scales, zeros, packed.in_blocks)


@triton.jit
def _decode(words, exponents, out, code: tl.constexpr, pieces: tl.constexpr, block: tl.constexpr):
    place = tl.program_id(0) * block + tl.arange(0, block)
    dtype: tl.constexpr = out.dtype.element_ty
    found = numbers(tl.load(words + place), dtype, code)
    for i in tl.static_range(pieces):
        value = found[i]
        if exponents is not None:
            value *= scale_of_e2m1(tl.load(exponents + place), dtype)
        tl.store(out + place * pieces + i, value)


def decoded(words, exponents, form, dtype, device):
    code = code_of(form, dtype, assembles=device_of(torch.device(device)) != INTERPRETER)
    pieces = 16 // code.BITS
    out = torch.empty(len(words), pieces, dtype=dtype, device=device)
    exponents = None if exponents is None else exponents.to(device)
    _decode[(len(words) // 1024,)](words.to(device), exponents, out, code=code, pieces=pieces, block=1024)
    return out.cpu().double(), code


@pytest.mark.whole
@pytest.mark.parametrize("form", ["e2m1", "e4m3", "int4"])
def test_every_code_at_every_place(form, dtype, device):
    """A bit of a neighbour that is left, a subnormal number, or a sign in another place would still give numbers."""
    words = torch.arange(ALL_WORDS)
    out, code = decoded(words.to(torch.int16), None, form, dtype, device)
    codes = torch.stack([words >> code.BITS * place & (1 << code.BITS) - 1 for place in range(out.shape[1])], 1)
    if form == "e2m1":
        expected = E2M1.double()[codes] / code.FACTOR
    elif form == "int4":
        expected = codes + code.FACTOR
    else:
        # NaN's codes stand for what they would be without it.
        nan = (codes & 127) == 127
        values = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
        expected = torch.where(nan, torch.where(codes > 127, -480.0, 480.0), values) / code.FACTOR
    assert torch.equal(out, expected)


def test_every_scale_of_e2m1(dtype, device):
    """Below fp16's numbers, values are rounded as the number itself would be; one step too far, they overflow."""
    exponents = torch.arange(MAX_EXPONENT + 1, dtype=torch.int32).repeat_interleave(16)
    words = torch.arange(16, dtype=torch.int16).repeat(MAX_EXPONENT + 1)
    missing = -len(words) % 1024
    words, exponents = (torch.nn.functional.pad(each, (0, missing)) for each in (words, exponents))
    out, _ = decoded(words, exponents, "e2m1", dtype, device)
    exact = E2M1.double()[words.long()] * torch.exp2(exponents.double() - 127)
    assert torch.equal(out[:, 0], exact.to(dtype).double())


@pytest.mark.matrix
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_sums_that_are_exact(form, dtype, device, randn):
    """Bit by bit what float64 and the kernel give with the values in 16 bits, whatever the order of sums.

    The gate is so large that its logistic is 1, and few inputs are not 0: no step rounds, or it rounds an exact number.
    """
    tokens, experts, k, size, inner = 6, 3, 2, 192, 40
    gate_up, down = (
        random_packed(*form, (experts, *shape), seed, exact=True)
        for seed, shape in enumerate(((2 * inner, size), (size, inner)))
    )
    ids, _ = reference.route(randn(tokens, experts), k, normalize=True)
    x = torch.zeros(tokens, size).scatter_(1, randn(tokens, size).topk(3).indices, 1.0)
    bias = torch.cat((torch.full((experts, inner), 512.0), torch.zeros(experts, inner)), 1)
    weights = torch.full((tokens, k), 0.5)
    arguments = [each.to(device) for each in (ids, weights)]
    own_x, own_bias = x.to(device, dtype), bias.to(device, dtype)
    out = kernel.parts(own_x, *arguments, to(gate_up, device), to(down, device), own_bias).cpu()
    dense = [values_of(each) for each in (gate_up, down)]
    same = kernel.parts(own_x, *arguments, *(each.to(device, dtype) for each in dense), own_bias).cpu()
    assert torch.equal(out, same)
    # Rounded between the products as the kernel rounds.
    expected = torch.empty(k, tokens, size, dtype=torch.float64)
    for token, slot in torch.cartesian_prod(torch.arange(tokens), torch.arange(k)).tolist():
        expert = ids[token, slot]
        gate, up = (dense[0][expert].double() @ x[token].double() + bias[expert]).to(dtype).chunk(2)
        expected[slot, token] = 0.5 * dense[1][expert].double() @ (gate.float() * up.float()).to(dtype).double()
    assert torch.equal(out.double(), expected) and expected.std() > 1


@pytest.mark.matrix
@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_random_numbers(form, shape, dtype, device, randn, assert_close):
    """Chunks that are cut off, rows that end inside of a tile, and experts in the place of others."""
    check(form, shape, (True, True), dtype, device, randn, assert_close)


@pytest.mark.parametrize("kept", [(True, False), (False, True)])
def test_one_of_both_is_quantized(kept, device, randn, assert_close):
    """Where a rank's columns are cut inside of a group, the second weight is dense, and both share a list of tiles."""
    check(FORMS[0], (9, 2, 1, 40, 48), kept, torch.float16, device, randn, assert_close)


def check(form, shape, kept, dtype, device, randn, assert_close):
    tokens, experts, k, size, inner = shape
    weights = [
        random_packed(*form, (experts, *own), seed) for seed, own in enumerate(((2 * inner, size), (size, inner)))
    ]
    dense = [values_of(each) for each in weights]
    # What the kernel multiplies: values in its dtype where it gets no others.
    exact = [each.double() if own else each.to(dtype).double() for each, own in zip(dense, kept, strict=True)]
    given = [
        to(each, device) if own else value.to(device, dtype)
        for each, own, value in zip(weights, kept, dense, strict=True)
    ]
    x = randn(tokens, size, dtype=dtype)
    ids, factors = reference.route(randn(tokens, experts), k, normalize=True)
    biases = randn(experts, 2 * inner, dtype=dtype), randn(experts, size, dtype=dtype)
    on_device = [each.to(device) for each in (x, ids, factors)]
    # Rows of fp8 have a test of their own.
    step = SIZES.measured.at(tokens * k // experts, dtype.itemsize)._replace(fp8=None, fp8_blocks=None)
    out = kernel.parts(*on_device, *given, *(each.to(device) for each in biases), step=step)
    wide = [each.double() for each in biases]
    expected = exact_parts(x.double(), ids, factors.double(), *exact, *wide, activation="silu_mul")
    assert_close(out.to(dtype), expected)


@pytest.mark.matrix
@pytest.mark.thorough
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_one_order_of_sums_for_all_numbers_of_tokens(form, narrow, device, randn, monkeypatch):
    """With ``--batch-invariant``: parts were fp32 for few tokens, and rows of fp8 weights rounded to fp8 for many."""
    if device == "cpu":
        add_up_exactly(monkeypatch)
    up, down = (to(random_packed(*form, shape, 0), device) for shape in ((3, 80, 192), (3, 192, 40)))
    most = 400
    x, (ids, factors) = randn(most, 192, dtype=narrow), reference.route(randn(most, 3), 2, normalize=True)

    def of_tokens(count, sizes):
        given = (each[:count].to(device) for each in (x, ids, factors))
        return kernel.parts(*given, up, down, sizes=sizes).float().sum(0).to(narrow)

    def is_invariant(sizes):
        whole = of_tokens(most, sizes)
        return all(torch.equal(of_tokens(n, sizes), whole[:n]) for n in (1, 9, 30, 130))

    assert is_invariant(SIZES.measured.invariant()) and not is_invariant(SIZES.measured)


@pytest.mark.parametrize("unit", [0, 128])
@pytest.mark.parametrize("shape", [(3, 24), (70, 128), (5, 200), (2, 1100)])
def test_rows_in_the_order_of_words(shape, unit, device, randn):
    """Byte by byte the numbers of the reference; bytes that were left behind the last column would be multiplied."""
    x = randn(*shape, dtype=torch.bfloat16)
    found, scales, _ = rows_kernel.quantize(x.to(device), unit, CHUNK)
    numbers, expected = fp8.quantize(x, unit)
    padded = torch.nn.functional.pad(numbers.view(torch.uint8), (0, -shape[1] % CHUNK))
    in_turns = padded.view(shape[0], -1, 2, CHUNK // 2).mT.reshape(padded.shape)
    assert torch.equal(found.cpu().view(torch.uint8), in_turns) and torch.equal(scales.cpu(), expected)


# In blocks, the first product's rows are no whole blocks, and then they are.
@pytest.mark.parametrize(
    ("unit", "inner", "in_blocks"), [(0, 200, False), (128, 200, False), (128, 200, True), (128, 256, True)]
)
@pytest.mark.parametrize("rows", [23, 24, 96])
def test_rows_of_fp8(rows, narrow, unit, inner, in_blocks, device, randn):
    """From 24 rows an expert on, rows are rounded to fp8 before both products. Sides are cut off, experts are empty.

    The first product is exact: inputs are 0 or a power of two times 448, and the gate's logistic is 1. So the rows of
    the second are known to the bit.
    """
    experts, k, size = 4, 2, 328
    tokens = rows * experts // k
    gate_up = random_packed("e4m3", unit, False, (experts, 2 * inner, size), 0, exact=True, in_blocks=in_blocks)
    down = random_packed("e4m3", unit, False, (experts, size, inner), 1, exact=True, in_blocks=in_blocks)
    x = torch.zeros(tokens, size).scatter_(1, randn(tokens, size).topk(3).indices, 448 / 256)
    ids, factors = torch.tensor([3, 1], dtype=torch.int32).repeat(tokens, 1), torch.full((tokens, k), 0.5)
    bias = torch.cat((torch.full((experts, inner), 64.0), torch.zeros(experts, inner)), 1)
    on_device = [each.to(device) for each in (x.to(narrow), ids, factors)]
    out = kernel.parts(*on_device, to(gate_up, device), to(down, device), bias.to(device, narrow)).cpu()
    dense = [values_of(each).double() for each in (gate_up, down)]
    for slot, expert in enumerate((3, 1)):
        gate, up = (x.double() @ dense[0][expert].t() + bias[expert]).to(narrow).float().chunk(2, 1)
        hidden = (gate * up).to(narrow)
        if rows >= 24:
            numbers, scales = fp8.quantize(hidden, unit)
            hidden = numbers.double() * scales.t().double().repeat_interleave(unit or inner, 1)[:, :inner]
        products = 0.5 * hidden.double()[:, None] * dense[1][expert]
        # Hopper cuts each product, and each sum before the next 32, to 14 bits of the largest of them.
        largest = torch.maximum(products.abs(), products.cumsum(2).abs()).amax(2)
        lost = 2**-13 * (inner + inner // 32) if device == "cuda" and rows >= 24 else 2**-17
        assert ((out[slot].double() - products.sum(2)).abs() <= lost * largest).all()


def test_rows_stay_in_16_bits(dtype):
    """GPUs before Ada have no such instruction; scales of half a chunk, other forms and few rows have no such tiles."""
    e4m3, halves, rest = (random_packed(*form, (1, 8, 128), 0) for form in (FORMS[1], FORMS[2], FORMS[0]))
    ada, ampere = Device.of_arch(89, 1), Device.of_arch(86, 1)
    step = SIZES.of(ada).at(24, dtype.itemsize)
    assert step.tiles(e4m3, e4m3, ada)[0].fp8 == (dtype != torch.float32)
    others = ((halves, e4m3), (e4m3, rest), (torch.empty(1, 8, 128), e4m3))
    assert not any(each.fp8 for pair in others for each in step.tiles(*pair, ada))
    assert not any(each.fp8 for each in step.tiles(e4m3, e4m3, ampere) + SIZES.of(ada).at(23, 2).tiles(e4m3, e4m3, ada))
