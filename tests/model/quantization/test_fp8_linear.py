"""fp8 weights that are multiplied as they are: the layouts that kernels have, cut, joined and reordered."""

import dataclasses
from collections import Counter

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from triton.runtime import interpreter

from rosebatch.config.switches import Switches
from rosebatch.model.quantization.chosen import choose_quantization
from rosebatch.model.quantization.dense import DenseWeight
from rosebatch.model.quantization.forms import form_of, load_weight
from rosebatch.model.quantization.joined import joined
from rosebatch.model.registry import build_model
from rosebatch.model.weights import SafetensorsWeights
from rosebatch.ops.select import select
from rosebatch_kernels.common.device import INTERPRETER, Device
from rosebatch_kernels.fp8.fp8_linear import Fp8Linear
from tests.engine.family_models import FAMILIES
from tests.model.quantization.numbers import encoder, seeded, spread
from tests.model.quantization.same_logits import CPU, attend_whole, write_both
from tests.model.quantization.test_fp8 import matrices

SIZES = {"q": (256, 384), "k": (128, 384), "v": (576, 384), "odd": (40, 384), "narrow": (128, 72)}
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128]}
TENSORS = {"quant_method": "fp8"}
GROUP = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
CHANNELS = {"quant_method": "compressed-tensors", "config_groups": {"group_0": GROUP}}


@pytest.fixture
def load(tmp_path):
    """Weights by name, in a form; all have scales of their own."""

    def weights(config, *names, dtype=torch.float16):
        tensors = {}
        for name in names:
            rows, columns = SIZES[name]
            grid = {"block": (-(-rows // 128), -(-columns // 128)), "tensor": (), "channel": (rows, 1)}
            kind = "block" if config is BLOCKS else "tensor" if config is TENSORS else "channel"
            generator = seeded(name)
            tensors[f"{name}.weight"] = torch.randn(rows, columns, generator=generator).to(torch.float8_e4m3fn)
            tensors[f"{name}.weight_scale"] = torch.rand(grid[kind], generator=generator) + 0.1
        save_file(tensors, tmp_path / "model.safetensors")
        source = SafetensorsWeights(tmp_path, dtype, CPU, form_of(config))
        return joined([load_weight(source, f"{name}.weight", SIZES[name]) for name in names])

    return weights


def require_kept(weight):
    """The product has the numbers and scales of all values; none was rounded again."""
    linear = weight.linear(None, INTERPRETER)
    assert isinstance(linear, Fp8Linear)
    in_blocks = linear.scales.ndim == 2
    each = spread(linear.scales, weight.shape, (128, 128)) if in_blocks else linear.scales[:, None]
    assert torch.equal((linear.weight.float() * each).half(), weight.dense())
    assert linear.scales.dtype == torch.float32 and linear.weight.is_contiguous()
    x = torch.randn(3, weight.shape[1], generator=seeded("x")).half()
    exact = x.double() @ weight.dense().double().t()
    assert (linear(x).double() - exact).norm() / exact.norm() < 0.04
    return in_blocks


@pytest.mark.parametrize("config", [TENSORS, CHANNELS, BLOCKS], ids=["tensors", "channels", "blocks"])
def test_joined_projections_keep_their_scales(load, config):
    """Others re-round all to the largest scale. The last block of v is cut off: 576 rows."""
    assert require_kept(load(config, "q", "k", "v")) is (config is BLOCKS)


@pytest.mark.parametrize("config", [TENSORS, CHANNELS], ids=["tensors", "channels"])
def test_rows_in_any_order_and_shards_anywhere(load, config):
    order = np.random.default_rng(0).permutation(384)[:208]
    assert not require_kept(load(config, "q", "k").rows(order).columns(range(48, 112)))


def test_shards_of_whole_blocks(load):
    weight = load(BLOCKS, "q", "k", "v")
    assert require_kept(weight.rows(range(128, 384)).columns(range(128, 384)))
    assert require_kept(weight.rows(np.r_[128:256, 384:512]))
    assert require_kept(weight.rows(np.r_[384:512, 0:256])), "as rows of Qwen3-Next are reordered"
    assert require_kept(weight.rows(np.arange(256)[::-1]))
    assert not require_kept(weight.rows(range(64)).columns(range(256, 320))), "within one block, one scale"


@pytest.mark.parametrize(
    "part",
    [
        lambda weight: weight.rows(range(64, 320)),
        lambda weight: weight.columns(range(64, 320)),
        lambda weight: weight.rows(np.r_[0:64, 128:192]),
    ],
    ids=["rows", "columns", "halves"],
)
def test_parts_of_blocks_are_decoded(load, part):
    """A rank's part may be smaller than a block: the kernel would take its neighbour's scale."""
    assert part(load(BLOCKS, "q", "k")).linear(None, INTERPRETER) is None


def test_projections_after_a_block_that_is_cut_off_are_decoded(load):
    """k's blocks would begin in the middle of the kernel's."""
    assert load(BLOCKS, "v", "k").linear(None, INTERPRETER) is None


def test_what_no_kernel_has(load):
    """Sizes that do not fill 16 bytes, runs in fp32, CPUs, and GPUs without e4m3."""
    assert load(CHANNELS, "odd").linear(None, INTERPRETER) is None
    assert load(CHANNELS, "narrow").linear(None, INTERPRETER) is None
    assert load(CHANNELS, "q", dtype=torch.float32).linear(None, INTERPRETER) is None
    weight = load(CHANNELS, "q")
    assert weight.linear(None, None) is None
    for arch, served in ((80, False), (86, False), (89, True), (90, True), (100, True), (120, True)):
        assert (weight.linear(None, Device.of_arch(arch, 84)) is not None) is served
    assert weight.stack([weight]).linear(None, INTERPRETER) is None
    assert dataclasses.replace(weight, kind=torch.int8).linear(None, INTERPRETER) is None
    assert dataclasses.replace(weight, zeros=weight.scales).linear(None, INTERPRETER) is None


def test_the_switch(load):
    """Off, weights are decoded; plain ones are never multiplied in fp8."""
    weight = load(CHANNELS, "q")
    for on in (False, True):
        ops = select(Switches.resolve({"quantized_linear": on}, "cuda"), "cuda")
        assert isinstance(ops.linear(weight, None), Fp8Linear) is on
        assert isinstance(ops.head(weight), Fp8Linear) is on
        assert not isinstance(ops.linear(DenseWeight.of(weight.dense()), None), Fp8Linear)


@pytest.mark.parametrize(
    ("config", "group"),
    [
        (None, None),
        (TENSORS, 0),
        (BLOCKS, 128),
        ({**BLOCKS, "weight_block_size": [64, 64]}, None),
        (CHANNELS, 0),
        ({**CHANNELS, "config_groups": {"a": {**GROUP, "weights": {"num_bits": 8, "type": "int"}}}}, None),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 0),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, None),
        ({"quant_method": "mxfp4"}, None),
    ],
)
def test_what_norms_and_gates_leave(config, group):
    """The other form would be made for nothing, and the right one once more."""
    assert choose_quantization("auto", config).input_group == group
    assert choose_quantization("none", config).input_group is None


def test_what_is_rounded_at_load():
    """Its scales are of rows."""
    assert choose_quantization("fp8", None).input_group == 0


@pytest.mark.thorough
@pytest.mark.parametrize("block", [[128, 128], None])
def test_a_model_gets_the_same_bits_whether_forms_are_left_or_not(tmp_path, monkeypatch, block):
    """And in place of four kernels a layer, one rounds: of what attention gives."""
    # Whole blocks, and more than one in a row.
    config = msgspec.structs.replace(FAMILIES["smollm3"], hidden_size=256, head_dim=128, intermediate_size=256)
    form = form_of({"quant_method": "fp8", "weight_block_size": block})
    packed, dense = write_both(tmp_path, config, encoder("smollm3", matrices(block)))
    launched: Counter[str] = Counter()
    run = interpreter.GridExecutor.__call__

    def counted(self, *args, **kwargs):
        launched.update([self.fn.__name__])
        run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", counted)
    logits, rounded = [], []
    for folder, each, group in ((packed, form, 0 if block is None else 128), (packed, form, None), (dense, None, None)):
        ops = select(Switches.resolve({"quantized_linear": True}, "cuda"), "cuda", input_group=group)
        launched.clear()
        with torch.inference_mode():
            model = build_model(config, ops, SafetensorsWeights(folder, torch.float16, CPU, each))
            logits.append(model.logits(model.forward(torch.arange(9), torch.arange(9), attend_whole)).float())
        rounded.append((launched["_fp8_product"], launched["_quantize"]))
    layers = config.num_layers
    assert rounded == [(4 * layers, 2 * layers), (4 * layers, 4 * layers), (0, 0)]
    assert torch.equal(logits[0], logits[1])
    assert (logits[0] - logits[2]).norm() / logits[2].norm() < 0.1
