"""AWQ of version gemm."""

import pytest
import torch
from safetensors.torch import save_file

from rosebatch.core.errors import UserError
from rosebatch.model.quantization.forms import form_of
from tests.model.quantization.numbers import (
    DENSE_FAMILIES,
    MOE_FAMILIES,
    RANKS,
    codes_of,
    encoder,
    model_of,
    packed,
    scales_of,
    spread,
)
from tests.model.quantization.same_logits import load_from, require_same_logits

# The order of eight columns in a word, from its lowest bits on.
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
CONFIG = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}


def matrix(name, shape, size=8):
    """Words hold eight outputs of one input."""
    grid = shape[0], -(-shape[1] // size)
    codes, zeros = codes_of(name, shape, 4), codes_of(f"zeros of {name}", grid, 4)
    scale = scales_of(name, grid, 4, torch.float16)

    def words(fields):
        return packed(fields.t().unflatten(1, (-1, 8))[:, :, ORDER].flatten(1), 4)

    tensors = {"qweight": words(codes), "qzeros": words(zeros), "scales": scale.t().contiguous()}
    values = (codes - spread(zeros, shape, (1, size))) * spread(scale, shape, (1, size))
    return {f"{name}.{key}": tensor for key, tensor in tensors.items()}, values


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("family", [*DENSE_FAMILIES, *MOE_FAMILIES])
def test_it_is_cut_joined_and_reordered(tmp_path, family, size):
    """Rows are in the middle of words, in an order of their own."""
    require_same_logits(tmp_path, model_of(family), encoder(family, matrix), form_of(CONFIG), size)


def test_modules_that_are_plain(tmp_path):
    """Lists hold parts of names, and are null though modules are plain: the tensors say which are quantized."""

    def encode(name, values):
        return ({}, values) if "layers.1" in name or "k_proj" in name else encoder("smollm3", matrix)(name, values)

    for place, listed in enumerate((None, ["layers.1", "k_proj"], ["1", "proj"])):
        (tmp_path / f"{place}").mkdir()
        form = form_of({**CONFIG, "modules_to_not_convert": listed})
        require_same_logits(tmp_path / f"{place}", model_of("smollm3"), encode, form, 1)


def test_the_quantizers_own_file(tmp_path):
    """``quant_config.json`` has other names of the fields."""
    form = form_of({"quant_method": "awq", "w_bit": 4, "q_group_size": 12, "zero_point": True, "version": "GEMM"})
    encode = encoder("smollm3", lambda name, shape: matrix(name, shape, 12))
    require_same_logits(tmp_path, model_of("smollm3"), encode, form, 2)


def load(folder, **fields):
    return load_from(folder, {**CONFIG, **fields}, "m.weight", (32, 32))


def test_what_contradicts(tmp_path):
    """Scales of 8 columns for 16 of them would be another model."""
    tensors, values = matrix("m", (32, 32))
    save_file(tensors, tmp_path / "model.safetensors")
    for size in (8, None):
        assert torch.equal(load(tmp_path, group_size=size).dense(), values)
    for size in (16, 12, -1):
        with pytest.raises(UserError, match=r"'m\.scales' of 32 columns has shape \(4, 32\)"):
            load(tmp_path, group_size=size)
    for missing in tensors:
        save_file({name: tensors[name] for name in tensors if name != missing}, tmp_path / "model.safetensors")
        with pytest.raises(UserError, match=r"no tensor 'm\.(weight|scales|qzeros)'"):
            load(tmp_path).dense()


def test_activations_that_are_to_be_divided(tmp_path):
    """AutoAWQ scales the activations of some families, such as StarCoder2: the values were dropped without a word."""
    tensors, _ = matrix("layers.0.mlp.c_fc", (16, 32))
    save_file({**tensors, "layers.0.mlp.act.scales": torch.ones(16)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"layers\.0\.mlp\.act\.scales is not supported"):
        load_from(tmp_path, CONFIG, "layers.0.mlp.c_fc.weight", (16, 32))
