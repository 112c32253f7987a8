"""Projections of one input in several formats: each stays in its own, whatever is cut, and values are the same."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

from rosebatch.config.switches import Switches
from rosebatch.model.lazy_tensor import LazyTensor
from rosebatch.model.quantization.dense import DenseWeight
from rosebatch.model.quantization.forms import form_of
from rosebatch.model.quantization.grouped import GroupedWeight
from rosebatch.model.quantization.joined import joined
from rosebatch.model.quantization.rounded import in_fp8
from rosebatch.model.weights import SafetensorsWeights
from rosebatch.ops.select import select
from rosebatch_kernels.fp8.fp8_linear import Fp8Linear
from rosebatch_kernels.linear.interface import Linear
from rosebatch_kernels.linear.joined import JoinedLinear
from tests.engine.family_models import FAMILIES
from tests.helpers.launches import one_at_a_time
from tests.model.quantization.numbers import PLAIN, RANKS, seeded
from tests.model.quantization.same_logits import CPU, OPS, all_logits, require_same_logits, write_both
from tests.model.quantization.test_fp8 import matrices

GATES = ("in_proj_a", "in_proj_b")


def values_of(rows, columns=32):
    return torch.randn(rows, columns, generator=seeded(str(rows))).half()


def fp8(rows):
    return in_fp8(LazyTensor.of(values_of(rows)), torch.float16)


def plain(rows):
    return DenseWeight.of(values_of(rows))


def require_parts(weight, expected, *kinds):
    """Its values, which one matrix for each of these formats has."""
    assert torch.equal(weight.dense(), expected)
    assert weight.shape == tuple(expected.shape)
    assert [type(part) for part in weight.parts()] == [*kinds]
    assert torch.equal(torch.cat([part.dense() for part in weight.parts()]), expected)


def test_neighbours_of_one_format_are_one_matrix():
    """A product for each projection would read its input four times."""
    each = [fp8(16), fp8(48), plain(8), plain(24)]
    weight, expected = joined(each), torch.cat([one.dense() for one in each])
    require_parts(weight, expected, GroupedWeight, DenseWeight)
    apart = expected[np.r_[64:72, 0:16, 72:96]]
    require_parts(joined([each[2], each[0], each[3]]), apart, DenseWeight, GroupedWeight, DenseWeight)
    require_parts(joined([weight, weight]), torch.cat([expected, expected]), *([GroupedWeight, DenseWeight] * 2))
    assert isinstance(joined(each[:2]), GroupedWeight) and isinstance(joined(each[2:]), DenseWeight)


def test_cut_and_reordered():
    """A rank may have no row of a part; rows that go to and fro between formats are values."""
    each = [fp8(16), plain(8)]
    weight, expected = joined(each), torch.cat([one.dense() for one in each])
    order = np.r_[15, 3:9, 23, 16:18]
    require_parts(weight.rows(order), expected[order], GroupedWeight, DenseWeight)
    require_parts(weight.columns(range(5, 9)).rows(range(20)), expected[:20, 5:9], GroupedWeight, DenseWeight)
    require_parts(weight.rows(range(4)), expected[:4], GroupedWeight)
    require_parts(weight.rows(range(18, 24)), expected[18:], DenseWeight)
    require_parts(weight.rows(np.r_[20, 0]), expected[[20, 0]], DenseWeight)
    assert torch.equal(weight.stack([weight]).dense(), torch.stack([expected, expected]))


class Times(Linear):
    """A product that counts its calls."""

    def __init__(self, weight, bias):
        self.weight, self.bias, self.calls = weight, bias, 0

    def __call__(self, x):
        self.calls += 1
        return x @ self.weight.t() + self.bias

    def product(self, x):
        return x @ self.weight.t()


def test_a_product_is_cut_where_its_parts_end():
    """Pieces are views of the parts' own results, or of all of them where one has columns of two."""
    weight, bias, x = values_of(24).float(), torch.arange(24.0), torch.randn(3, 32, generator=seeded("x"))
    parts = [Times(weight[:16], bias[:16]), Times(weight[16:], bias[16:])]
    linear, whole = JoinedLinear(parts, [16, 8], bias), Times(weight, bias)
    torch.testing.assert_close(linear(x), whole(x))
    torch.testing.assert_close(linear.product(x), whole.product(x))
    for sizes in ([16, 8], [4, 12, 8], [4, 12, 6, 2], [24], [8, 16], [4, 14, 6]):
        for piece, expected in zip(linear.split(x, sizes), whole.split(x, sizes), strict=True):
            torch.testing.assert_close(piece, expected)
    assert linear.split(x, [4, 12, 6, 2])[1]._base.shape == (3, 16)
    assert parts[0].calls == parts[1].calls == 8


def encoded(block):
    """Blocks of each matrix of a layer but the gates of the delta rule, as Qwen publishes them."""
    matrix = matrices(block)

    def encode(name, values):
        if values.ndim != 2 or any(part in name for part in (*PLAIN, *GATES)):
            return {}, values
        return matrix(name.removesuffix(".weight"), tuple(values.shape))

    return encode


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_gates_of_the_delta_rule_are_plain(tmp_path, name, size):
    """On a CPU values are joined: tokens are those of the dense copy."""
    form = form_of({"quant_method": "fp8", "weight_block_size": [8, 8]})
    require_same_logits(tmp_path, FAMILIES[name], encoded([8, 8]), form, size)


class Compared(Linear):
    """Its pieces are those of decoded values; the same of weights that are kept must be near."""

    def __init__(self, kept, decoded):
        self.kept, self.decoded, self.bias = kept, decoded, None

    def __call__(self, x):
        return self.decoded(x)

    product = __call__

    def split(self, x, sizes):
        own, expected = self.kept.split(x, sizes), self.decoded.split(x, sizes)
        for bound, piece, exact in zip((0.08, 0.08, 1e-3, 1e-3), own, expected, strict=True):
            assert (piece - exact).float().norm() / exact.float().norm() < bound
        return expected


@pytest.mark.thorough
@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("name", ["qwen3_5", "qwen3_next"])
def test_the_rest_of_their_product_stays_in_fp8(tmp_path, monkeypatch, name, size):
    """The four were decoded together: half of a layer's weights. Qwen3-Next's rows are reordered, by whole blocks."""
    config = msgspec.structs.replace(FAMILIES[name], hidden_size=256, experts=None)
    config = msgspec.structs.replace(config, delta=msgspec.structs.replace(config.delta, key_dim=128, value_dim=128))
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    packed, _ = write_both(tmp_path, config, encoded([128, 128]))
    on_gpu = select(Switches.resolve({"quantized_linear": True}, "cuda"), "cuda")
    found = []

    def compared(weight, bias):
        kept, decoded = on_gpu.linear(weight, bias), OPS.linear(weight, bias)
        if not isinstance(kept, JoinedLinear):
            return decoded
        found.append([(type(each), len(each.weight)) for each in kept.linears])
        return Compared(kept, decoded)

    one_at_a_time(monkeypatch)
    source = SafetensorsWeights(packed, torch.float16, CPU, form_of(quantization))
    all_logits(config, source, size, replace(OPS, linear=compared))
    delta = config.delta
    wide, heads = delta.channels + delta.value_heads * delta.value_dim, 2 * delta.value_heads
    assert len(found) == size * sum(delta.layers) > 0
    for (kind, rows), (other, gates) in found:
        assert (kind, rows, gates) == (Fp8Linear, wide // size, heads // size) and other is not Fp8Linear
