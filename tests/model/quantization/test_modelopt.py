"""ModelOpt, by NVIDIA."""

import json

import pytest
import torch
from safetensors.torch import save_file

from rosebatch.core.errors import UserError
from rosebatch.model.quantization.chosen import read_quantization
from rosebatch.model.quantization.forms import form_of, load_weight
from rosebatch.model.weights import SafetensorsWeights
from tests.model.quantization.numbers import (
    DENSE_FAMILIES,
    E2M1,
    MOE_FAMILIES,
    RANKS,
    codes_of,
    encoder,
    model_of,
    mxfp8,
    packed,
    scales_of,
    seeded,
    spread,
)
from tests.model.quantization.same_logits import CPU, load_from, require_same_logits

FP8 = torch.float8_e4m3fn
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}


def fp8(name, shape, *, rows=False):
    """One scale, or one a row; inputs have one too."""
    numbers = (torch.randn(shape, generator=seeded(name)) * 99).to(FP8)
    scale = scales_of(name, (shape[0],) if rows else (1,))
    tensors = {"weight": numbers, "weight_scale": scale if rows else scale[0], "input_scale": torch.tensor(3.0)}
    values = numbers.float() * scale.unsqueeze(1)
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}, values


def nvfp4(name, shape):
    """Values are multiplied by the scale of all; each projection has its own."""
    scale = (torch.rand((shape[0], shape[1] // 16), generator=seeded(f"scale {name}")) * 100 + 1).to(FP8)
    whole, codes = 2.0 ** -(10 + codes_of(f"whole {name}", (), 2)), codes_of(name, shape, 4)
    tensors = {
        "weight": packed(codes, 4, 8),
        "weight_scale": scale,
        "weight_scale_2": whole,
        "input_scale": torch.tensor(len(name) / 7),
        **({"k_scale": torch.tensor(0.5)} if name.endswith("k_proj") else {}),
    }
    values = E2M1[codes] * spread(scale.float() * whole, shape, (1, 16))
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}, values


def by_rows(name, shape):
    return fp8(name, shape, rows=True)


def form(algorithm, **fields):
    return form_of({"quant_method": "modelopt", "quant_algo": algorithm, **fields})


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("family", [*DENSE_FAMILIES, *MOE_FAMILIES])
@pytest.mark.parametrize("matrix", [nvfp4, pytest.param(fp8, marks=pytest.mark.thorough)])
def test_it_is_cut_joined_and_reordered(tmp_path, matrix, family, size):
    """q, k and v, and gate and up, have scales of their own, of weights and of inputs: one for all made them noise."""
    algorithm = matrix.__name__.upper()
    require_same_logits(tmp_path, model_of(family), encoder(family, matrix), form(algorithm), size)


@pytest.mark.parametrize(
    ("algorithm", "matrix"),
    [("FP8", fp8), ("FP8_PER_CHANNEL_PER_TOKEN", by_rows), ("MXFP8", mxfp8), ("W4A16_NVFP4", nvfp4)],
)
def test_each_form(tmp_path, algorithm, matrix):
    """The tensors say which one it is."""
    require_same_logits(tmp_path, model_of("phi3"), encoder("phi3", matrix), form(algorithm), 2)


def test_a_mixture(tmp_path):
    """``quantized_layers`` has the form of each module."""
    chosen = {"up_proj": fp8, "down_proj": mxfp8}

    def encode(name, values):
        if "k_proj" in name:
            return {}, values
        return encoder("smollm3", next((f for end, f in chosen.items() if end in name), nvfp4))(name, values)

    layers = {"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "NVFP4", "group_size": 16}, "c": {"quant_algo": "MXFP8"}}
    mixed = form("MIXED_PRECISION", quantized_layers=layers, exclude_modules=["*k_proj", "lm_head"])
    require_same_logits(tmp_path, model_of("smollm3"), encode, mixed, 2)


def test_the_quantizers_own_file(tmp_path):
    """Without ``quantization_config``, ``hf_quant_config.json`` alone says it."""
    tensors, values = nvfp4("model.layers.0.mlp.up_proj", (32, 32))
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    fields = {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["*.1.*"]}
    text = json.dumps({"producer": {"name": "modelopt", "version": "0.47"}, "quantization": fields})
    (tmp_path / "hf_quant_config.json").write_text(text)

    def load():
        weights = SafetensorsWeights(tmp_path, torch.float32, CPU, read_quantization(tmp_path).form)
        return load_weight(weights, "model.layers.0.mlp.up_proj.weight", (32, 32)).dense()

    assert torch.equal(load(), values)
    (tmp_path / "hf_quant_config.json").write_text(text.replace("*.1.*", "*.0.*"))
    with pytest.raises(UserError, match=r"exclude_modules has '\*\.0\.\*', and model\.layers\.0\.mlp\.up_proj is"):
        load()
    (tmp_path / "hf_quant_config.json").write_text(text.replace("NVFP4", "W4A8_AWQ"))
    with pytest.raises(UserError, match=r"hf_quant_config\.json: .*quant_algo 'W4A8_AWQ' is not supported"):
        load()


@pytest.mark.parametrize("missing", ["weight", "weight_scale", "weight_scale_2"])
def test_what_is_missing(tmp_path, missing):
    """Without the scale of all, values would be thousands of times as large."""
    tensors, _ = nvfp4("m", (32, 32))
    del tensors[f"m.{missing}"]
    save_file(tensors, tmp_path / "model.safetensors")
    message = (
        r"'m\.weight' holds 'U8', and there are no scales" if missing == "weight_scale" else f"no tensor 'm.{missing}'"
    )
    with pytest.raises(UserError, match=message):
        load_from(tmp_path, NVFP4, "m.weight", (32, 32)).dense()


def test_inputs_that_are_to_be_scaled(tmp_path):
    """AWQ's factors of the inputs would be dropped."""
    tensors, _ = nvfp4("m", (32, 32))
    save_file({**tensors, "m.pre_quant_scale": torch.ones(32)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"m\.pre_quant_scale is not supported"):
        load_from(tmp_path, NVFP4, "m.weight", (32, 32))


@pytest.mark.parametrize(
    ("algorithm", "matrix", "has"),
    [("FP8", nvfp4, "4 bits in groups of 16"), ("NVFP4", fp8, "8 bits"), ("FP8", mxfp8, "8 bits in groups of 32")],
)
def test_tensors_of_another_form(tmp_path, algorithm, matrix, has):
    """They were read, and memory was planned for the form that the config names."""
    tensors, _ = matrix("m", (32, 32))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=rf"quantization_config: quant_algo is another than of m, which has {has}$"):
        load_from(tmp_path, {**NVFP4, "quant_algo": algorithm}, "m.weight", (32, 32))
