"""What a device keeps of a quantized checkpoint, as plans, floors and people are told."""

from dataclasses import replace

import pytest
import torch

from rosebatch.config.switches import Switches
from rosebatch.model.quantization.chosen import choose_quantization
from rosebatch.model.quantization.forms import load_matrix
from rosebatch.model.quantization.rounded import random_in
from rosebatch.model.random_weights import RandomWeights
from rosebatch.ops.layout import Layout, MatrixBytes
from rosebatch.ops.select import keeps, keeps_experts
from rosebatch_kernels.common.device import Device
from tests.model.quantization import test_awq
from tests.model.quantization.same_logits import CPU

SWITCHES = Switches.resolve({}, "cpu")


@pytest.mark.parametrize(
    ("kept", "text"),
    [
        ((), "awq int4, groups of 8, decoded to bfloat16"),
        (("keeps",), "awq int4, groups of 8, partly decoded to bfloat16"),
        (("keeps", "keeps_experts"), "awq int4, groups of 8"),
    ],
)
def test_what_is_decoded_is_said(kept, text, monkeypatch):
    """A line that names the form alone lets users expect a quarter of the memory."""
    for name in kept:
        monkeypatch.setattr(f"rosebatch.model.quantization.chosen.{name}", lambda *_: True)
    chosen = choose_quantization("auto", test_awq.CONFIG)
    assert chosen.described(SWITCHES, "cuda", torch.bfloat16, has_experts=True) == text
    # Half a byte, and a scale of two bytes and a zero of four for eight numbers.
    size = {"keeps": 1.25, "": 2}
    assert chosen.kept(SWITCHES, "cuda", torch.bfloat16) == MatrixBytes(
        layers=size["keeps" if "keeps" in kept else ""], experts=size["keeps" if "keeps_experts" in kept else ""]
    )
    plain = choose_quantization("none", None)
    assert plain.described(SWITCHES, "cuda", torch.bfloat16, has_experts=True) is None
    assert plain.kept(SWITCHES, "cuda", torch.bfloat16) == MatrixBytes(2, 2)


def test_fp8_products_have_a_rate_of_their_own(monkeypatch):
    """Inputs and weights of one byte are multiplied faster than the 16-bit rate that a floor is made of."""
    monkeypatch.setattr("rosebatch.model.quantization.chosen.keeps", lambda *_: True)
    assert choose_quantization("fp8", None).kept(SWITCHES, "cuda", torch.bfloat16) == MatrixBytes(1, 2, fp8=True)
    assert not choose_quantization("auto", test_awq.CONFIG).kept(SWITCHES, "cuda", torch.bfloat16).fp8
    assert not choose_quantization("auto", {"quant_method": "mxfp4"}).kept(SWITCHES, "cuda", torch.bfloat16).fp8


@pytest.mark.parametrize("arch", [80, 89, 90])
@pytest.mark.parametrize(
    ("layout", "first"),
    [
        (Layout(8, True, (128, 128)), 89),
        (Layout(8, True, (1, 0)), 89),
        (Layout(8, True, (0, 0)), 89),
        (Layout(8, True, (64, 64)), None),
        (Layout(8, True, (1, 32)), None),
        (Layout(8, False, (1, 0)), None),
        (Layout(4, False, (1, 128)), 80),
        (Layout(4, False, (1, 32), zeros=True), 80),
        (Layout(3, False, (1, 0)), 80),
        (Layout(4, False, (1, 8)), None),
        (Layout(5, False, (1, 128)), None),
        (Layout(4, True, (1, 16)), None),
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_a_gpu_keeps(layout, first, arch, dtype, monkeypatch):
    """A plan that counts on kept weights where products decode them ends in a lack of memory, and the reverse."""
    device = Device.of_arch(arch, 100)
    monkeypatch.setattr("rosebatch.ops.select.device_of", lambda _: device)
    on = Switches.resolve({"quantized_linear": True}, "cuda")
    weights = RandomWeights(dtype, CPU, rounding=random_in([layout], CPU))
    product = load_matrix(weights, "a.weight", (256, 256)).linear(None, device)
    found = keeps(layout, on, "cuda", dtype)
    assert found == (product is not None) == (first is not None and arch >= first and dtype == torch.bfloat16)
    assert not keeps(layout, replace(on, quantized_linear=False), "cuda", dtype)
    assert not keeps(layout, on, "cpu", dtype)


@pytest.mark.parametrize(
    ("layout", "kept"),
    [
        (Layout(8, True, (128, 128)), True),
        (Layout(8, True, (1, 0)), True),
        (Layout(8, True, (64, 64)), True),
        (Layout(8, True, (1, 32)), False),
        (Layout(8, False, (1, 0)), False),
        (Layout(4, False, (1, 128)), True),
        (Layout(4, False, (1, 32), zeros=True), True),
        (Layout(4, False, (1, 16)), False),
        (Layout(5, False, (1, 128)), False),
        (Layout(4, True, (1, 32), of_experts=True), True),
    ],
)
def test_which_experts_a_gpu_keeps(layout, kept, monkeypatch):
    """As for other matrices: most of a model's weights are experts'."""
    on = Switches.resolve({"quantized_linear": True}, "cuda")
    monkeypatch.setattr("rosebatch.ops.select.device_of", lambda _: Device.of_arch(90, 100))
    weights = RandomWeights(torch.bfloat16, CPU, rounding=random_in([layout], CPU))
    experts = load_matrix(weights, "a.weight", (2, 128, 256)).experts()
    assert keeps_experts(layout, on, "cuda", torch.bfloat16) == (experts is not None) == kept
    assert not keeps_experts(layout, replace(on, quantized_linear=False), "cuda", torch.bfloat16)
    monkeypatch.setattr("rosebatch.ops.select.device_of", lambda _: Device.of_arch(100, 100))
    assert not keeps_experts(layout, on, "cuda", torch.bfloat16)
