"""Integers of 4 bits that are multiplied as they are: every form, cut, joined and reordered, has its values."""

import dataclasses

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rosebatch.model.lazy_tensor import LazyTensor
from rosebatch.model.quantization import packed_linear
from rosebatch.model.quantization.forms import form_of, load_weight
from rosebatch.model.quantization.joined import joined
from rosebatch.model.quantization.rounded import random_in
from rosebatch.model.random_weights import DEVIATION
from rosebatch.model.weights import SafetensorsWeights
from rosebatch.ops.layout import Layout
from rosebatch_kernels.common.device import INTERPRETER
from rosebatch_kernels.int4 import reference
from rosebatch_kernels.int4.int4_linear import Int4Linear
from tests.model.quantization import test_awq, test_compressed_tensors, test_gptq
from tests.model.quantization.same_logits import CPU
from tests.model.quantization.test_memory import Largest

SIZES = {"q": (64, 384), "k": (24, 384), "v": (40, 384), "odd": (12, 384), "cut": (16, 200)}


def awq(size, **_):
    return lambda name, shape: test_awq.matrix(name, shape, size or shape[1]), {
        **test_awq.CONFIG,
        "group_size": size or -1,
    }


def gptq(size, *, bits=4, symmetric=False, shuffled=False, version="gptq"):
    matrix = test_gptq.matrices(bits, size, symmetric=symmetric, version=version, shuffled=shuffled)
    return matrix, test_gptq.config_of(bits, size, sym=symmetric, desc_act=shuffled, checkpoint_format=version)


def compressed(size, *, bits=4, symmetric=False, shuffled=False):
    matrix, weights = test_compressed_tensors.words(bits, size, symmetric=symmetric, shuffled=shuffled)
    return matrix, test_compressed_tensors.config_of(**weights)


@pytest.fixture
def load(tmp_path):
    """Weights by name, joined, in a form; all have numbers of their own."""

    def weights(form, *names, dtype=torch.float16, size=128, **options):
        matrix, config = form(size, **options)
        tensors = {}
        for name in names:
            tensors |= matrix(name, SIZES[name])[0]
        save_file({name: each.contiguous() for name, each in tensors.items()}, tmp_path / "model.safetensors")
        source = SafetensorsWeights(tmp_path, dtype, CPU, form_of(config))
        return joined([load_weight(source, f"{name}.weight", SIZES[name]) for name in names])

    return weights


def require_kept(weight):
    """The product has all values, bit by bit, in 4 bits each. Returns the product."""
    linear = weight.linear(None, INTERPRETER)
    assert isinstance(linear, Int4Linear)
    own, values = linear.weight, reference.decode(linear.weight, weight.dense().dtype)
    expected = weight.dense() if linear._order is None else weight.dense()[:, linear._order]
    assert torch.equal(values, expected)
    assert own.words.nbytes == weight.shape[0] * -(-weight.shape[1] // 128) * 64
    assert own.scales.itemsize == 2
    return linear


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("size", [32, 64, 128, None])
@pytest.mark.parametrize("form", [awq, gptq, compressed])
@pytest.mark.matrix
def test_forms_and_groups(load, form, size, symmetric, dtype):
    """None: a scale for a row, which is that of all of its groups."""
    linear = require_kept(load(form, "q", dtype=dtype, size=size, symmetric=symmetric))
    assert linear.weight.group == (size or 128)
    assert (linear.weight.zeros is None) == (symmetric and form is not awq)


@pytest.mark.parametrize("form", [awq, gptq, compressed])
def test_joined_cut_and_reordered(load, form):
    """Words of AWQ hold rows, of GPTQ columns: neither may show. Half a group is a group of 64."""
    weight = load(form, "q", "k", "v")
    order = np.random.default_rng(0).permutation(128)[:104]
    assert require_kept(weight.rows(order).columns(range(128, 384))).weight.group == 128
    assert require_kept(weight.columns(range(64, 320))).weight.group == 64


@pytest.mark.parametrize("form", [gptq, compressed])
def test_columns_in_any_order(load, form):
    """``desc_act``: columns are sorted, and x with them. A rank's columns are of all groups, and are decoded.

    Projections of one input have one order; of several orders, each has a product.
    """
    weight = load(form, "q", shuffled=True)
    weight = weight.join([weight])
    linear = require_kept(weight)
    x = torch.randn(3, 384, generator=torch.Generator().manual_seed(0)).half()
    torch.testing.assert_close(linear(x), (x.double() @ weight.dense().double().t()).half(), rtol=4e-3, atol=4e-3)
    assert weight.columns(range(192)).linear(None, INTERPRETER) is None
    assert [require_kept(part).weight.shape[0] for part in load(form, "q", "k", shuffled=True).parts()] == [64, 24]


@pytest.mark.parametrize("bits", [2, 3])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("form", [gptq, compressed])
@pytest.mark.matrix
def test_fewer_bits(load, form, symmetric, bits):
    """They are multiplied as numbers of 4 bits."""
    require_kept(load(form, "q", bits=bits, symmetric=symmetric))


def test_a_version_that_stores_other_zeros(load):
    require_kept(load(gptq, "q", version="gptq_v2"))


@pytest.mark.parametrize("zeros", [False, True])
def test_random_weights(zeros):
    """``--load-format dummy`` measures the products of the form that the config names."""
    rounding = random_in([Layout(4, False, (1, 128), zeros=zeros)], CPU)
    weight = rounding(LazyTensor.of(torch.randn(16, 256) * DEVIATION), torch.float16)
    linear = weight.linear(None, INTERPRETER)
    assert torch.equal(reference.decode(linear.weight, torch.float16), weight.dense())
    assert random_in([Layout(8, False, (1, 128))], CPU)(weight.numbers, torch.float16).linear(None, INTERPRETER) is None


def test_a_last_group_that_is_cut_off(load):
    require_kept(load(compressed, "cut"))


def test_what_no_kernel_has(load):
    """8 bits, rows that do not fill 16 bytes, groups that cross a word's places, runs in fp32, CPUs, and experts."""
    assert load(gptq, "q", bits=8).linear(None, INTERPRETER) is None
    assert load(compressed, "odd").linear(None, INTERPRETER) is None
    assert load(compressed, "q", size=48).linear(None, INTERPRETER) is None
    assert load(awq, "q", size=16).linear(None, INTERPRETER) is None
    assert load(awq, "q", dtype=torch.float32).linear(None, INTERPRETER) is None
    weight = load(awq, "q")
    assert weight.linear(None, None) is None
    assert weight.stack([weight]).linear(None, INTERPRETER) is None
    assert dataclasses.replace(weight, zeros=None).linear(None, INTERPRETER) is None


def test_joined_with_more_bits(load):
    """Nibbles would lose half of a matrix with 8 bits. One of fewer bits has the same product."""
    few, fewer, many = load(gptq, "q"), load(gptq, "k", bits=3), load(gptq, "v", bits=8)
    first, last = joined([few, fewer, many]).parts()
    assert require_kept(first).weight.shape[0] == 64 + 24
    assert last.linear(None, INTERPRETER) is None


@pytest.mark.parametrize("form", [awq, gptq, compressed])
def test_codes_of_some_rows_are_in_memory(load, form, monkeypatch):
    """A byte for each code of a whole matrix took the memory of two matrices more."""
    weight = load(form, "q", "k", "v")
    expected = require_kept(weight).weight.words
    monkeypatch.setattr(packed_linear, "AT_ONCE", 8 * 384)
    with Largest(itemsize=1) as largest:
        words = weight.linear(None, INTERPRETER).weight.words
    assert torch.equal(words, expected)
    assert largest.elements <= max(words.numel(), 8 * 384)
