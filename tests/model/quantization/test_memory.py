"""What is in memory while a matrix is decoded."""

import math

import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from tests.model.quantization.numbers import codes_of
from tests.model.quantization.same_logits import load_from

SIZE = 200


class Largest(TorchDispatchMode):
    """The most elements of a tensor of so many bytes an element that was made."""

    def __init__(self, itemsize=4):
        super().__init__()
        self.itemsize = itemsize
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.itemsize >= self.itemsize:
            self.elements = max(self.elements, out.numel())
        return out


def experts():
    """MXFP4, all experts of a layer in one tensor."""
    blocks = codes_of("blocks", (3, 64, 2, 16), 8).to(torch.uint8)
    scales = torch.full((3, 64, 2), 120, dtype=torch.uint8)
    return {"m_blocks": blocks, "m_scales": scales}, {"quant_method": "mxfp4"}, "m", (3, 64, 64)


def fp8():
    tensors = {"m.weight": torch.randn(64, 64).to(torch.float8_e4m3fn), "m.weight_scale": torch.ones(1)}
    return tensors, {"quant_method": "fp8"}, "m.weight", (64, 64)


@pytest.mark.parametrize("make", [experts, fp8])
def test_four_bytes_a_value_of_a_part_alone(tmp_path, monkeypatch, make):
    """fp32 values of all experts, or the table's indices, took several times the memory of the result."""
    tensors, config, name, shape = make()
    save_file(tensors, tmp_path / "model.safetensors")
    weight = load_from(tmp_path, config, name, shape, torch.bfloat16)
    expected = weight.dense()
    monkeypatch.setattr("rosebatch.model.quantization.grouped.AT_ONCE", SIZE)
    monkeypatch.setattr("rosebatch.model.quantization.packing.AT_ONCE", SIZE)
    with Largest() as largest:
        assert torch.equal(weight.dense(), expected)
    # Scales of all groups are small.
    assert largest.elements <= max(SIZE, math.prod(shape) // 32)
