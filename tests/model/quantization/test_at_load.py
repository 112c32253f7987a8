"""``--quantization``: matrices that a run rounds while it loads them, decodes, or makes at random."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file

from rosebatch.config.run import RunConfig
from rosebatch.core.errors import FlagError
from rosebatch.model.lazy_tensor import LazyTensor
from rosebatch.model.quantization import forms
from rosebatch.model.quantization.chosen import choose_quantization
from rosebatch.model.quantization.forms import form_of, load_matrix
from rosebatch.model.quantization.grouped import GroupedWeight
from rosebatch.model.quantization.rounded import in_fp8, random_in
from rosebatch.model.random_weights import DEVIATION, RandomWeights
from rosebatch.model.registry import build_model
from rosebatch.model.source import find_model
from rosebatch.model.weights import SafetensorsWeights
from tests.engine.family_models import FAMILIES
from tests.helpers.checkout import ROOT
from tests.helpers.small_llama import save_llama
from tests.model.quantization import test_awq, test_compressed_tensors, test_gptq
from tests.model.quantization.numbers import PLAIN
from tests.model.quantization.same_logits import CPU, OPS, all_logits, write_both
from tests.model.quantization.test_folders import answers, save, write

FP32, E4M3 = torch.float32, torch.float8_e4m3fn


def rounded(values):
    """Numbers and scales of rows, by the formula alone."""
    scale = torch.clamp(values.float().abs().amax(-1, keepdim=True) / 448, min=1 / (448 * 512))
    return (values.float() / scale).to(E4M3), scale


def matrix(values):
    """A weight of this matrix in memory."""
    return in_fp8(LazyTensor.of(values), FP32)


def values_of(shape, seed=0):
    """Rows of very different size; one is zero, one nearly."""
    found = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    found *= torch.logspace(-3, 1, shape[-2]).unsqueeze(-1)
    found[..., 1, :] = 0
    found[..., 2, :] *= 1e-9
    return found


def require_parts(weight, expected, scales):
    """Its numbers and scales, whichever is read first."""
    assert torch.equal(weight.numbers.read(), expected.view(torch.uint8))
    assert torch.equal(weight.scales.read().index_select(-2, torch.from_numpy(weight.row_of)), scales)
    assert torch.equal(weight.dense(), expected.float() * scales)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_scale_is_the_largest_value_of_a_row(dtype, monkeypatch):
    """By true division: times a reciprocal, midpoints were rounded to the other side. Rows of 0 stay 0."""
    monkeypatch.setattr("rosebatch.model.quantization.rounded.AT_ONCE", 80)
    values = values_of((12, 40)).to(dtype)
    numbers, scales = rounded(values)
    require_parts(matrix(values), numbers, scales)
    assert scales[1] == 1 / (448 * 512)
    assert numbers[0].float().abs().max() == 448
    other = matrix(values)
    assert torch.equal(other.scales.read(), scales)


def test_a_part_has_the_scale_of_the_whole_row():
    """The largest value of a rank's columns alone gave ranks other numbers than one process has."""
    values = values_of((12, 40))
    numbers, scales = rounded(values)
    part = matrix(values).rows([7, 3, 3, 0]).columns(range(5, 9))
    require_parts(part, numbers[[7, 3, 3, 0], 5:9], scales[[7, 3, 3, 0]])
    experts = values_of((3, 12, 40))
    numbers, scales = rounded(experts)
    own = matrix(experts).rows(range(4, 12)).columns(range(5, 9))
    require_parts(own, numbers[:, 4:, 5:9], scales[:, 4:])
    joined = matrix(values).join([matrix(values_of((4, 40), 1))]).rows([15, 0])
    assert torch.equal(joined.dense()[1], matrix(values).dense()[0])


def test_rows_are_read_once():
    """Twice, loading took twice as long."""
    reads = []
    values = LazyTensor.of(values_of((12, 40))).map(lambda read: reads.append(0) or read)
    weight = in_fp8(values, FP32).rows([2, 1, 7])
    weight.dense()
    assert len(reads) == 1


def encoded(name, values):
    """What compressed-tensors has in a matrix's place."""
    if any(part in name for part in PLAIN):
        return {}, values
    numbers, scales = rounded(values)
    return {name: numbers, f"{name}_scale": scales}, numbers.float() * scales


CHANNELS = test_compressed_tensors.config_of(num_bits=8, type="float", strategy="channel")


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["smollm3", "glm4", "qwen3_moe", "mixtral", "phi3"])
def test_logits_are_those_of_a_copy_that_was_rounded_before(name, size, tmp_path):
    """Fused and reordered projections, experts in one tensor, and ranks that have columns of a row."""
    copy, plain = tmp_path / "copy", tmp_path / "plain"
    copy.mkdir()
    plain.mkdir()
    packed, _ = write_both(copy, FAMILIES[name], encoded)
    _, plain = write_both(plain, FAMILIES[name], lambda _, values: ({}, values))
    expected = all_logits(FAMILIES[name], SafetensorsWeights(packed, FP32, CPU, form_of(CHANNELS)), size)
    out = all_logits(FAMILIES[name], SafetensorsWeights(plain, FP32, CPU, rounding=in_fp8), size)
    assert all(torch.equal(each, same) for each, same in zip(out, expected, strict=True))
    unrounded = all_logits(FAMILIES[name], SafetensorsWeights(plain, FP32, CPU), size)
    assert not torch.equal(out[0], unrounded[0])


class Watched(RandomWeights):
    """Keeps the names of the matrices that are rounded."""

    def __init__(self):
        super().__init__(FP32, CPU, rounding=self.watched)
        self.names, self.is_rounding = set(), False

    def watched(self, values, dtype):
        def part(cuts):
            self.is_rounding = True
            read = values.part(cuts)
            self.is_rounding = False
            return read

        return in_fp8(LazyTensor(values.shape, part), dtype)

    def get(self, name, shape, **options):
        if self.is_rounding:
            self.names.add(re.sub(r".*\.\d\.", "", name).removesuffix(".weight"))
        return super().get(name, shape, **options)


ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}
MLP = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
EXPERTS = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
GRANITE = {f"{part}.{name}_linear" for part in ("block_sparse_moe", "shared_mlp") for name in ("input", "output")}
SHARED = {f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")}


@pytest.mark.parametrize(
    ("name", "names"),
    [
        ("smollm3", ATTENTION | MLP),
        ("gpt_oss", ATTENTION | EXPERTS),
        ("granite4_h", ATTENTION | GRANITE | {"mamba.in_proj", "mamba.out_proj"}),
        ("qwen3_next", ATTENTION | MLP | EXPERTS | SHARED | {"linear_attn.in_proj_qkvz", "linear_attn.out_proj"}),
    ],
)
def test_what_is_rounded(name, names):
    """A router that is rounded chooses other experts, a gate forgets at another rate; heads cost the most quality."""
    weights = Watched()
    build_model(FAMILIES[name], OPS, weights)
    assert weights.names == names


def test_steps_of_mamba2_are_not_rounded(tmp_path):
    """They are rows of one matrix with all else that Mamba2 reads: rounded, they forget at another rate."""
    config = FAMILIES["bamba"]
    _, folder = write_both(tmp_path, config, lambda _, values: ({}, values))
    x, sizes = torch.eye(config.hidden_size), [config.mamba.inner, config.mamba.channels, config.mamba.heads]

    def pieces(rounding):
        model = build_model(config, OPS, SafetensorsWeights(folder, FP32, CPU, rounding=rounding))
        return model.layers[0].attention.projection.split(x, sizes)

    assert [torch.equal(*each) for each in zip(pieces(in_fp8), pieces(None), strict=True)] == [False, False, True]


FORMS = {
    "awq int4, groups of 8": test_awq.CONFIG,
    "gptq int4, groups of 8": test_gptq.config_of(),
    "gptq int8, a scale a row": test_gptq.config_of(8, -1, sym=True),
    "compressed-tensors fp8, a scale a row": CHANNELS,
    "compressed-tensors int4, groups of 8": test_compressed_tensors.config_of(**test_compressed_tensors.group_of(4, 8)),
    "fp8, blocks of 8 x 16": {"quant_method": "fp8", "weight_block_size": [8, 16]},
    "modelopt fp4, groups of 16": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "modelopt fp8, a scale a matrix": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "bitsandbytes": {"quant_method": "bitsandbytes"},
    "mxfp4 fp4, groups of 32": {"quant_method": "mxfp4"},
}


@pytest.mark.parametrize("name", FORMS)
def test_names_of_forms(name):
    """Reports and ``check`` have them. ``--resume`` names the flag's value: "fp8 at load" was none."""
    assert choose_quantization("fp8", None).identity == "fp8"
    assert choose_quantization("auto", FORMS[name]).name == name
    assert choose_quantization("none", FORMS[name]).identity == "none"
    assert choose_quantization(FORMS[name]["quant_method"], FORMS[name]).name == name


def test_every_form_has_a_name_and_a_row():
    """A form that is not in ``FORMS`` above had no name for ``--quantization``, and nothing said so."""
    methods = {config["quant_method"] for config in FORMS.values()}
    page = (ROOT / "docs" / "quantization.md").read_text(encoding="utf-8")
    assert forms.FORMS.keys() == methods == {method for method in methods if f"\n| `{method}` |" in page}


def test_modules_of_several_forms():
    """The name has them all."""
    groups = {
        "a": {"targets": ["re:.*mlp"], "weights": test_compressed_tensors.group_of(4, 8)},
        "b": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
    }
    name = choose_quantization("auto", test_compressed_tensors.with_groups(groups)).name
    assert name == "compressed-tensors int4, groups of 8 and fp8, a scale a row"


@pytest.mark.parametrize("name", FORMS)
def test_random_weights_of_a_form(name):
    """A bench of a quantized config ran 16-bit weights: its figures were those of another model."""
    layouts = choose_quantization("auto", FORMS[name]).form.layouts
    weights = RandomWeights(FP32, CPU, rounding=random_in(layouts, CPU))
    matrix = load_matrix(weights, "a.weight", (48, 64))
    experts = load_matrix(weights, "b.weight", (2, 48, 64))
    assert isinstance(experts, GroupedWeight) == bool(layouts)
    assert isinstance(matrix, GroupedWeight) == (bool(layouts) and name.partition(" ")[0] != "mxfp4")
    for weight in (matrix, experts):
        dense = weight.dense()
        assert 0.9 < dense.std() / DEVIATION < 1.2
        assert torch.equal(weight.rows(range(9, 30)).columns(range(16, 48)).dense(), dense[..., 9:30, 16:48])


@pytest.mark.parametrize(
    ("asked", "config", "message"),
    [
        ("awq", None, "--quantization awq: the checkpoint is not quantized: fp8 rounds its weights"),
        ("awq", test_gptq.config_of(), "--quantization awq: the checkpoint is gptq int4, groups of 8: leave it out"),
        ("fp8", test_awq.CONFIG, "--quantization fp8: the checkpoint is awq int4, groups of 8: leave it out"),
        ("fp8", CHANNELS, "--quantization fp8: the checkpoint is compressed-tensors fp8, a scale a row: leave it out"),
    ],
)
def test_what_contradicts_the_checkpoint(asked, config, message):
    """Read as another form, it would be noise; rounded twice, it would be worse than both."""
    with pytest.raises(FlagError, match=message):
        choose_quantization(asked, config)


@pytest.mark.parametrize(
    "name", ["auto", "none", "fp8", "fp8_per_channel", "gptq_marlin", "awq_marlin", "modelopt_fp4"]
)
def test_other_engines_names(name):
    """Scripts that were written for vLLM and SGLang name the checkpoint's own form."""
    assert RunConfig(quantization=name).quantization == name


def test_names_that_are_not_served():
    """One line says what is."""
    with pytest.raises(ValueError, match=r"must be auto, fp8, none, or what the checkpoint is .*, got 'hqq'"):
        RunConfig(quantization="hqq")


def test_tokens_are_those_of_a_copy(tmp_path):
    """A whole folder, by the library's keyword."""
    write(tmp_path, None, None, taken=lambda name: False)
    folder = tmp_path / "dense"
    found = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        found |= (encoded(name, tensor)[0] if tensor.ndim > 1 else {}) or {name: tensor}
    config = json.loads((folder / "config.json").read_text())
    save(tmp_path / "packed", found, {**config, "quantization_config": CHANNELS})
    expected = answers(tmp_path / "packed")
    assert answers(folder, quantization="fp8") == expected != answers(folder, quantization=None)
    assert answers(tmp_path / "packed", quantization="none") == expected


def test_the_fallback_takes_16_bits_alone(tmp_path):
    """transformers' code would get fp8 bytes."""
    save_llama(tmp_path)
    config = RunConfig(model=str(tmp_path), device="cpu", model_impl="transformers", quantization="fp8")
    with pytest.raises(
        FlagError, match=r"--quantization fp8: transformers' own code runs this model, .*: leave it out"
    ):
        find_model(config, CPU)
