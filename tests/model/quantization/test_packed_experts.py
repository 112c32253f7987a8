"""Experts that stay quantized: the kernel's form has the same values, cut, reordered and stacked, or there is none."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.utils._python_dispatch import TorchDispatchMode

from rosebatch.model.lazy_tensor import LazyTensor
from rosebatch.model.quantization import packed_experts
from rosebatch.model.quantization.dense import DenseWeight
from rosebatch.model.quantization.grouped import GroupedWeight, in_groups
from rosebatch.model.quantization.packing import E2M1_KIND
from rosebatch_kernels.experts.packed import CHUNK
from tests.helpers.packed_experts import values_of
from tests.model.quantization.numbers import codes_of, scales_of, seeded
from tests.model.quantization.same_logits import load_from


def grouped(kind, shape, block, *, bits=8, zeros=False, scale=None):
    """Random numbers; of each group another scale."""
    *_, rows, columns = shape
    grid = shape[0], -(-rows // block[0]), -(-columns // block[1])
    codes = codes_of("m", shape, bits).to(torch.uint8)
    if kind == torch.float8_e4m3fn:
        codes %= 127
    if kind == E2M1_KIND:
        scales = torch.exp2(torch.randint(-12, 2, grid, generator=seeded("m")).float())
    else:
        scales = scales_of("m", grid)
    return GroupedWeight(
        numbers=LazyTensor.of(codes),
        kind=kind,
        scales=LazyTensor.of(scales if scale is None else torch.full(grid, scale)),
        zeros=LazyTensor.of(codes_of("zeros", grid, 4).to(torch.uint8)) if zeros else None,
        row_of=in_groups(rows, block[0]),
        group_of=in_groups(columns, block[1]),
        dtype=torch.float32,
        bits=bits,
    )


FORMS = {
    "mxfp4": ((E2M1_KIND, (3, 40, 192), (1, 32)), {"bits": 4}, ("e2m1", 32)),
    "mxfp4, its last group cut off": ((E2M1_KIND, (2, 40, 72), (1, 32)), {"bits": 4}, ("e2m1", 32)),
    "fp8 in blocks that are cut off": ((torch.float8_e4m3fn, (3, 200, 320), (128, 128)), {}, ("e4m3", 128)),
    "fp8 in blocks of 64": ((torch.float8_e4m3fn, (3, 70, 320), (64, 64)), {}, ("e4m3", 64)),
    "fp8, a scale a row": ((torch.float8_e4m3fn, (3, 33, 136), (1, 136)), {}, ("e4m3", 0)),
    "fp8, a scale a matrix": ((torch.float8_e4m3fn, (3, 33, 136), (33, 136)), {}, ("e4m3", 0)),
    "int4 in groups of 128": ((torch.uint8, (3, 40, 256), (1, 128)), {"bits": 4, "zeros": True}, ("int4", 128)),
    "int4 in groups of 32": ((torch.uint8, (3, 40, 160), (1, 32)), {"bits": 4, "zeros": True}, ("int4", 32)),
    "int4 in groups of 64": ((torch.uint8, (3, 40, 192), (1, 64)), {"bits": 4, "zeros": True}, ("int4", 32)),
    "int4, a scale a row": ((torch.uint8, (3, 40, 160), (1, 160)), {"bits": 4, "zeros": True}, ("int4", 0)),
}


def require_kept(weight, *, form=None, unit=None):
    packed = weight.experts()
    assert packed is not None and packed.shape == weight.shape
    assert torch.equal(values_of(packed), weight.dense())
    assert form is None or (packed.form, packed.unit) == (form, unit)
    # A kernel that took one scale for rows that have several would be wrong.
    firsts = packed.scales[..., ::CHUNK].repeat_interleave(CHUNK, 2)[..., : weight.shape[1]]
    assert not packed.in_blocks or torch.equal(firsts, packed.scales)
    return packed


@pytest.mark.parametrize("name", FORMS)
def test_the_same_values(name):
    """Also of rows that alternate, of columns cut between groups, and where a block ends with each expert."""
    arguments, options, (form, unit) = FORMS[name]
    weight = grouped(*arguments, **options)
    whole = require_kept(weight, form=form, unit=unit)
    assert whole.in_blocks == (name in ("fp8 in blocks that are cut off", "fp8, a scale a matrix"))
    rows = weight.shape[1]
    apart = np.concatenate([np.arange(0, rows, 2), np.arange(1, rows, 2)])
    require_kept(weight.rows(apart))
    require_kept(weight.rows(range(3, rows - 2)))
    start = unit if unit > 0 else 5
    require_kept(weight.columns(range(start, weight.shape[2])))


def test_signed_integers():
    """From -8 on; an integer of 8 bits among them is none."""
    numbers = codes_of("m", (2, 24, 130), 4).to(torch.int8) - 8
    weight = replace(
        grouped(torch.int8, (2, 24, 130), (1, 128), bits=4),
        numbers=LazyTensor.of(numbers.view(torch.uint8)),
        kind=torch.int8,
    )
    require_kept(weight, form="int4", unit=128)
    numbers[1, 3, 5] = 8
    assert weight.experts() is None


@pytest.mark.parametrize(
    "weight",
    [
        # A rank's columns begin inside of a group: groups of the kernel would begin there (gpt-oss, four ranks).
        grouped(E2M1_KIND, (2, 24, 160), (1, 32), bits=4).columns(range(16, 160)),
        grouped(torch.uint8, (2, 24, 256), (1, 128), bits=4, zeros=True).columns(range(48, 256)),
        # Scales that are no powers of two, or so large that a number times a step of the kernel's would overflow.
        grouped(E2M1_KIND, (2, 24, 64), (1, 32), bits=4, scale=0.75),
        grouped(E2M1_KIND, (2, 24, 64), (1, 32), bits=4, scale=4.0),
        grouped(E2M1_KIND, (2, 24, 64), (1, 32), bits=4, scale=-0.5),
        # NVFP4's groups, MXFP8's, integers of 8 bits, and those of columns in another order.
        grouped(E2M1_KIND, (2, 24, 64), (1, 16), bits=4),
        grouped(torch.float8_e4m3fn, (2, 24, 64), (1, 32)),
        grouped(torch.int8, (2, 24, 64), (1, 64)),
        replace(grouped(torch.uint8, (2, 24, 256), (1, 128), bits=4, zeros=True), group_of=np.arange(256) % 2),
        # Without zeros, unsigned integers are as they are.
        grouped(torch.uint8, (2, 24, 64), (1, 64), bits=4),
        DenseWeight.of(torch.zeros(2, 24, 64)),
    ],
)
def test_what_the_kernel_does_not_decode(weight):
    assert weight.experts() is None


def test_every_power_of_two():
    """The smallest scale is a subnormal number of fp32; the largest that is kept is 2."""
    exponents = torch.arange(129).repeat(2)[:160].view(1, 5, 32)
    scales = torch.exp2(exponents.float() - 127)
    assert scales.min() == 2.0**-127 and scales.max() == 2
    weight = grouped(E2M1_KIND, (1, 5, 1024), (1, 32), bits=4)
    packed = require_kept(replace(weight, scales=LazyTensor.of(scales)))
    assert torch.equal(packed.scales[0, 0] & 255, exponents[0, :, 0].int())


class Bytes(TorchDispatchMode):
    """The most bytes of a tensor that was made."""

    largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.untyped_storage().nbytes() != self.kept:
            self.largest = max(self.largest, out.untyped_storage().nbytes())
        return out


def test_some_experts_at_a_time(tmp_path, monkeypatch):
    """A byte a code of all experts takes twice the memory that is kept, and their values eight times."""
    shape = 16, 64, 128
    blocks, scales = codes_of("blocks", (16, 64, 4, 16), 8), torch.full((16, 64, 4), 120)
    save_file({"m_blocks": blocks.byte(), "m_scales": scales.byte()}, tmp_path / "model.safetensors")
    weight = load_from(tmp_path, {"quant_method": "mxfp4"}, "m", shape)
    expected = require_kept(weight)
    monkeypatch.setattr(packed_experts, "_AT_ONCE", 2 * 64 * 128)
    with Bytes() as made:
        made.kept = expected.words.nbytes
        packed = weight.experts()
    assert torch.equal(packed.words, expected.words) and torch.equal(packed.scales, expected.scales)
    assert made.largest <= packed.words.nbytes


def test_blocks_of_each_expert(tmp_path):
    """Files have each expert apart, gate and up too: a block may not reach into what is stacked below it."""
    (hidden, inner), tensors = (136, 40), {}
    for expert in range(3):
        for name, shape in (
            ("gate_proj", (inner, hidden)),
            ("up_proj", (inner, hidden)),
            ("down_proj", (hidden, inner)),
        ):
            own = f"mlp.experts.{expert}.{name}.weight"
            tensors[own] = torch.randn(shape, generator=seeded(own)).to(torch.float8_e4m3fn)
            tensors[f"{own}_scale_inv"] = scales_of(own, tuple(-(-size // 128) for size in shape))
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}

    def of(expert, name, shape):
        return load_from(tmp_path, config, f"mlp.experts.{expert}.{name}.weight", shape)

    both = [of(e, "gate_proj", (inner, hidden)).join([of(e, "up_proj", (inner, hidden))]) for e in range(3)]
    down = [of(e, "down_proj", (hidden, inner)) for e in range(3)]
    require_kept(both[0].stack(both[1:]), form="e4m3", unit=128)
    require_kept(down[0].stack(down[1:]), form="e4m3", unit=0)
