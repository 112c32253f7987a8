"""Products whose bits do not depend on the number of rows, and the trial that finds where those of a library do."""

import pytest
import torch

from rosebatch.config.switches import Switches
from rosebatch.model.quantization.dense import DenseWeight
from rosebatch.ops import select as select_module
from rosebatch.ops.ops import Partial
from rosebatch.ops.select import select
from rosebatch_kernels.common.device import INTERPRETER, device_of
from rosebatch_kernels.common.sizes import value_at
from rosebatch_kernels.linear import kernel, sizes
from rosebatch_kernels.linear.invariant import FixedLinear, differing_rows
from rosebatch_kernels.linear.streamed import StreamedLinear
from rosebatch_kernels.linear.torch_linear import TorchLinear
from rosebatch_kernels.mlp import kernel as mlp_kernel

GPU = device_of(torch.device("cuda"))
pytestmark = pytest.mark.usefixtures("poisoned_outputs")


class OneOrder(TorchLinear):
    """Adds up each row by itself, the depth in ``parts(rows)`` parts."""

    def __init__(self, weight, bias=None, parts=lambda rows: 1, residual_parts=lambda rows: 1):
        super().__init__(weight, bias)
        self.parts_of = parts
        self.residual_parts = residual_parts

    def __call__(self, x):
        return (self._sum(x, self.parts_of(len(x))) + (0 if self.bias is None else self.bias)).to(x.dtype)

    def product(self, x):
        return self._sum(x, self.parts_of(len(x))).to(x.dtype)

    def adds_in_place(self, x):
        return self.bias is None

    def add_(self, x, onto):
        return onto.copy_(onto + self._sum(x, self.residual_parts(len(x))))

    def _sum(self, x, parts):
        total = torch.zeros(len(x), len(self.weight))
        for share, w in zip(x.float().chunk(parts, 1), self.weight.float().chunk(parts, 1), strict=True):
            part = torch.zeros_like(total)
            for column, factor in zip(share.t(), w.t(), strict=True):
                part += column[:, None] * factor
            total += part
        return total


def splits_few(rows):
    return 2 if rows <= 16 else 1


@pytest.mark.parametrize("size_in", [128, 129])
def test_the_trial_finds_a_split_depth(dtype, size_in):
    """cuBLAS divides the depth of few rows: sums of ordinary numbers are rounded alike too often to show it."""
    weight, rows = torch.empty(96, size_in, dtype=dtype), (1, 2, 16, 17, 40)
    assert differing_rows(OneOrder, weight, None, rows) is None
    assert differing_rows(lambda w, b: OneOrder(w, b, splits_few), weight, None, rows) == 17
    assert differing_rows(lambda w, b: OneOrder(w, b, splits_few), weight, torch.empty(96), rows) == 17


def test_the_trial_finds_a_residual_that_is_added_otherwise():
    weight = torch.empty(96, 128)
    trial = differing_rows(lambda w, b: OneOrder(w, b, residual_parts=splits_few), weight, None, (1, 16, 17))
    assert trial == 17


def test_the_trial_finds_another_rounding():
    """Sums near zero are rounded alike once and twice: no trial of few numbers saw it, and rows of a model differed."""

    class RoundsFewOnce(OneOrder):
        def add_(self, x, onto):
            product = self._sum(x, 1)
            return onto.copy_(onto.float() + (product if len(x) <= 16 else product.to(x.dtype)))

    assert differing_rows(RoundsFewOnce, torch.empty(64, 64, dtype=torch.bfloat16), None, (1, 16, 17)) == 17


def test_the_trial_finds_rows_that_differ_within_a_product():
    """A tile's last rows may be computed by another kernel than its first."""

    def product(weight, bias):
        def call(x):
            out = OneOrder(weight)(x)
            out[3:] = OneOrder(weight, parts=lambda rows: 2)(x[3:])
            return out

        return call

    assert differing_rows(product, torch.empty(96, 128), None, (1, 3, 5)) == 5


def test_the_trial_takes_a_bounded_memory(monkeypatch):
    """The output projection of many rows would be gigabytes."""
    monkeypatch.setattr("rosebatch_kernels.linear.invariant._MOST", 128 * 10)
    seen = []

    def product(weight, bias):
        return lambda x: seen.append(len(x)) or OneOrder(weight)(x)

    assert differing_rows(product, torch.empty(96, 128), None, (1, 10, 11)) is None
    assert seen == [1, 10] * 2


def test_fixed_tiles_of_any_number_of_rows(dtype, device, randn, assert_close, monkeypatch):
    """The fallback is right, gives a row its bits alone, and is cut where offsets would leave 32 bits."""
    monkeypatch.setattr("rosebatch_kernels.linear.invariant._ROWS_AT_ONCE", 128)
    x, bias = randn(200, 72, dtype=dtype).to(device), randn(40, dtype=dtype).to(device)
    weight = (randn(40, 72) * 72**-0.5).to(device, dtype)
    exact = x.double() @ weight.double().t()
    for own in (None, bias):
        layer = FixedLinear(weight, own, GPU)
        whole = layer(x)
        assert_close(whole, exact if own is None else exact + own.double())
        assert_close(layer.product(x), exact)
        for some in (slice(0, 1), slice(0, 129), slice(128, 200)):
            assert torch.equal(layer(x[some]), whole[some])
    residual = randn(200, 40, dtype=dtype).to(device)
    total = FixedLinear(weight, None, GPU).add_(x, residual.clone())
    assert_close(total, exact + residual.double())
    if device == "cuda":
        # The interpreter's matrix product adds up in an order that goes by the row's place in a tile.
        assert differing_rows(lambda w, b: FixedLinear(w, b, GPU), weight, bias) is None


@pytest.mark.parametrize("rows", [1, 33, 64])
def test_a_product_is_rounded_before_the_residual(rows, narrow, device, randn):
    """As cuBLAS does in place: rounded once, a row went by the size of its batch.

    Sums are exact in fp32: tiles differ, and the interpreter adds up in an order that goes by them.
    """
    x, weight = ((randn(count, 128) * 16).round().div(16).to(device, narrow) for count in (rows, 48))
    onto = randn(rows, 48, dtype=narrow).to(device)
    options = {"sizes": sizes.SIZES.of(GPU), "device": GPU}
    twice = onto + kernel.linear(x, weight, **options)
    assert not torch.equal((onto.double() + x.double() @ weight.double().t()).to(narrow), twice)
    assert torch.equal(kernel.add_(x, weight, onto.clone(), **options), twice)
    if rows <= value_at(sizes.SIZES.of(GPU).max_rows_onto, 128) or device == "cuda":
        # More rows are cuBLAS's; on a CPU PyTorch's product rounds once.
        assert torch.equal(StreamedLinear(weight, None, GPU, invariant=True).add_(x, onto.clone()), twice)


def test_a_sum_in_parts_is_another(narrow, device, randn):
    """Without one part for all: of products that add up to nothing, what is left is the order of the additions."""
    half, weight, order = randn(1, 512), randn(48, 512).repeat(1, 2), randn(1024).argsort()
    x, weight = (each[:, order].to(device, narrow) for each in (torch.cat([half, -half], 1), weight))
    options = {"sizes": sizes.SIZES.of(GPU), "device": GPU}
    whole, parts = kernel.linear(x, weight, **options), kernel.parts(x, weight, **options)
    assert len(parts) > 1
    assert not torch.equal(parts.sum(0).to(narrow), whole)


def test_gelu_of_a_sum_is_another(narrow, device, randn):
    """Without one rule: the product's kernel takes it of the sum, the MLP's kernel of the rounded product."""
    x, weight = randn(8, 128, dtype=narrow).to(device), randn(48, 128, dtype=narrow).to(device) / 8
    bias = randn(48, dtype=narrow).to(device)
    layer = StreamedLinear(weight, bias, GPU)
    assert layer.activates(x, "gelu_tanh")
    behind = mlp_kernel.bias_gelu_tanh_(layer.product(x), bias, sizes=mlp_kernel.SIZES.of(GPU), device=GPU)
    assert not torch.equal(layer.activated(x, "gelu_tanh"), behind)


ROWS = [1, 16, 64, 65, 128, 129, 512, 513]


def paths(layer, size_in):
    """What decides how a row is multiplied and rounded, by numbers of rows."""
    dtype = layer.weight.dtype
    kinds = [
        (layer.divides(x), layer.adds_in_place(x), layer.activates(x, "gelu_tanh"))
        for x in (torch.empty(n, size_in, dtype=dtype) for n in ROWS)
    ]
    return set(kinds)


@pytest.mark.parametrize("biased", [False, True])
def test_one_path_for_all_numbers_of_rows(biased, narrow):
    """Parts, residuals rounded once or twice, and GELU in cuBLAS: each gave a row other bits in another batch."""
    weight, bias = torch.empty(64, 256, dtype=narrow), torch.empty(64, dtype=narrow) if biased else None
    assert paths(StreamedLinear(weight, bias, INTERPRETER, invariant=True), 256) == {(False, not biased, False)}
    assert len(paths(StreamedLinear(weight, bias, INTERPRETER), 256)) > 1


@pytest.fixture
def invariant_ops(monkeypatch):
    """The operators of a GPU with the switch on, whose library products are these."""
    monkeypatch.setattr(select_module, "device_of", lambda _: INTERPRETER)

    def make(products, **switches):
        monkeypatch.setattr(select_module.linear, "TorchLinear", products)
        return select(Switches.resolve({"batch_invariant": True, **switches}, "cuda"), "cuda")

    return make


@pytest.mark.whole
@pytest.mark.parametrize(("parts", "kind"), [(lambda rows: 1, OneOrder), (splits_few, FixedLinear)])
def test_the_trial_chooses_the_product(parts, kind, invariant_ops, monkeypatch):
    """A library that splits some sums serves none of that shape; one that splits none is faster than our fallback."""
    monkeypatch.setattr("rosebatch_kernels.linear.invariant.ROWS", (1, 16, 17))
    tried = []

    def product(weight, bias):
        tried.append(weight.shape)
        return OneOrder(weight, bias, parts)

    ops = invariant_ops(product, streamed_linear=False)
    weights = [DenseWeight.of(torch.ones(size, 128, dtype=torch.float16)) for size in (96, 96, 64)]
    made = [ops.linear(weight, None) for weight in weights]
    assert {type(layer) for layer in made} == {kind}
    # Once for each shape with both kinds of numbers, if the first shows nothing; besides what is used.
    used = [(96, 128), (96, 128), (64, 128), (96, 128), (64, 128)] if kind is OneOrder else []
    assert sorted(tried) == sorted([*used, (96, 128), (64, 128)])


def test_the_residual_has_one_rule(invariant_ops, monkeypatch):
    """The norm gets the product of any number of rows in the same way."""
    monkeypatch.setattr("rosebatch_kernels.linear.invariant.ROWS", (1,))
    monkeypatch.setattr("rosebatch_kernels.linear.streamed.can_stream", lambda *_: True)
    ops = select(Switches.resolve({"batch_invariant": True}, "cuda"), "cuda")
    layer = ops.linear(DenseWeight.of(torch.ones(64, 128, dtype=torch.float16)), None)
    assert isinstance(layer, StreamedLinear)
    for rows in (1, 64, 65, 600):
        partial = ops.project(layer, torch.ones(rows, 128, dtype=torch.float16))
        assert isinstance(partial, Partial) and partial.projection is layer
