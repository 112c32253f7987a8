"""fp8 weights with scales for matrices, rows or blocks, as DeepSeek, Qwen, Mistral and GPTQModel write them."""

import pytest
import torch
from safetensors.torch import save_file

from rosebatch.core.errors import UserError
from rosebatch.model.quantization.forms import form_of
from tests.engine.family_models import FAMILIES
from tests.model.quantization.numbers import DENSE_FAMILIES, MOE_FAMILIES, RANKS, encoder, seeded, spread
from tests.model.quantization.same_logits import load_from, require_same_logits


def matrices(block, scale_dtype=torch.float32, name_of_scale="weight_scale_inv"):
    """Blocks are cut off at the ends; None: one scale a matrix."""

    def matrix(name, shape):
        high, wide = block or shape
        grid = -(-shape[0] // high), -(-shape[1] // wide)
        scale = ((torch.rand(grid, generator=seeded(f"scale {name}")) + 0.1) / 8).to(scale_dtype)
        numbers = torch.randn(shape, generator=seeded(name)).to(torch.float8_e4m3fn)
        tensors = {f"{name}.weight": numbers, f"{name}.{name_of_scale}": scale if block else scale.reshape(())}
        return tensors, numbers.float() * spread(scale, shape, (high, wide))

    return matrix


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize("name", [*DENSE_FAMILIES, "minicpm3", *MOE_FAMILIES])
@pytest.mark.parametrize("block", [pytest.param([8, 8], marks=pytest.mark.thorough), [5, 7], [128, 128], None])
def test_blocks_are_cut_joined_and_reordered(tmp_path, name, block, size):
    """Blocks that are cut off, shards that begin inside of one, and projections with scales of their own."""
    form = form_of({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block})
    require_same_logits(tmp_path, FAMILIES[name], encoder(name, matrices(block)), form, size)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale"])
def test_a_scale_is_a_factor_of_any_dtype(tmp_path, dtype, scale):
    """Its name says inverse. Others were read as fp32, and bytes are exponents.

    With ``ue8m0``, scales that are no powers of two were rounded to some: 2.6 % more error.
    """
    form = form_of({"quant_method": "fp8", "weight_block_size": [8, 8], "scale_fmt": "ue8m0"})
    require_same_logits(tmp_path, FAMILIES["smollm3"], encoder("smollm3", matrices([8, 8], dtype, scale)), form, 1)


@pytest.mark.parametrize("block", [None, [8, 8]])
def test_scales_that_are_divisors(tmp_path, block):
    """GPTQModel's ``weight_scale_inv`` is what its name says, and a field tells: the values were multiplied by it."""

    def matrix(name, shape):
        tensors, _ = matrices(block or [1, shape[1]])(name, shape)
        divisors = 2.0 ** -(tensors[f"{name}.weight_scale_inv"] * 99).round()
        values = tensors[f"{name}.weight"].float() / spread(divisors, shape, block or (1, shape[1]))
        # It stores scales of rows without a dimension of columns.
        return {**tensors, f"{name}.weight_scale_inv": divisors if block else divisors[:, 0]}, values

    method = {"weight_scale_method": "block" if block else "row", "weight_scale_semantics": "inverse"}
    form = form_of({"quant_method": "fp8", "weight_block_size": block, **method})
    assert form.layouts[0].block == (tuple(block) if block else (1, 0))
    require_same_logits(tmp_path, FAMILIES["smollm3"], encoder("smollm3", matrix), form, 2)


def test_a_divisor_of_zero(tmp_path):
    """Its reciprocal is infinite: all tokens were nonsense."""
    tensors, _ = matrices([8, 8])("x", (32, 24))
    tensors["x.weight_scale_inv"][3, 2] = 0
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"quant_method": "fp8", "weight_block_size": [8, 8], "weight_scale_semantics": "inverse"}
    with pytest.raises(UserError, match=r"'x\.weight_scale_inv' has a value that is no finite number"):
        load_from(tmp_path, config, "x.weight", (32, 24)).dense()


def test_the_last_block_is_smaller(tmp_path):
    """By the number of scales, 448 rows in 4 blocks became blocks of 112: nearly half of the rows had another's."""
    tensors, values = matrices([128, 128])("x", (448, 200))
    save_file(tensors, tmp_path / "model.safetensors")
    weight = load_from(tmp_path, {"quant_method": "fp8", "weight_block_size": [128, 128]}, "x.weight", (448, 200))
    assert torch.equal(weight.dense(), values)


def test_what_contradicts(tmp_path):
    """Values of other scales would be another model, without a word."""
    tensors, _ = matrices([8, 8])("x", (32, 24))
    save_file(tensors, tmp_path / "model.safetensors")

    def load(**config):
        return load_from(tmp_path, {"quant_method": "fp8", **config}, "x.weight", (32, 24))

    assert load(weight_block_size=[8, 8], modules_to_not_convert=["y", "xx"]).shape == (32, 24)
    with pytest.raises(UserError, match=r"modules_to_not_convert has 'x', and x is quantized"):
        load(weight_block_size=[8, 8], modules_to_not_convert=["x"])
    with pytest.raises(
        UserError, match=r"groups of \(16, 16\) need .* \(2, 2\), and .*'x\.weight_scale_inv' has \(4, 3\)"
    ):
        load(weight_block_size=[16, 16])


@pytest.mark.parametrize("block", [None, [1, 32]])
def test_a_scale_for_each_column(tmp_path, block):
    """Of a square matrix it was taken for one for each row."""
    numbers = torch.randn(32, 32).to(torch.float8_e4m3fn)
    save_file({"x.weight": numbers, "x.weight_scale": torch.rand(1, 32)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"need scales of shape \(32, 1\), and tensor 'x\.weight_scale' has \(1, 32\)"):
        load_from(tmp_path, {"quant_method": "fp8", "weight_block_size": block}, "x.weight", (32, 32))


def test_what_is_missing(tmp_path):
    """Numbers without their scales were taken for values."""
    tensors, _ = matrices([8, 8])("x", (32, 24))
    del tensors["x.weight_scale_inv"]
    save_file(tensors, tmp_path / "model.safetensors")
    weight = load_from(tmp_path, {"quant_method": "fp8"}, "x.weight", (32, 24))
    with pytest.raises(UserError, match=r"'x\.weight' holds 'F8_E4M3', and there are no scales for it of the form"):
        weight.dense()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_scales_that_are_no_numbers(tmp_path, value):
    """All tokens were nonsense."""
    tensors, _ = matrices([8, 8])("x", (32, 24))
    tensors["x.weight_scale_inv"][3, 2] = value
    save_file(tensors, tmp_path / "model.safetensors")
    weight = load_from(tmp_path, {"quant_method": "fp8", "weight_block_size": [8, 8]}, "x.weight", (32, 24))
    with pytest.raises(UserError, match=r"'x\.weight_scale_inv' has a value that is no finite number"):
        weight.dense()


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_some_experts_are_plain(tmp_path, family):
    """A layer's first expert, one of its matrices, and a whole layer: all were taken for quantized, or none."""

    def matrix(name, shape):
        if any(part in name for part in ("layers.1", "experts.0", "experts.2.up", "experts.2.w3", "experts.3.down")):
            values = torch.randn(shape, generator=seeded(name)) / 8
            return {f"{name}.weight": values}, values
        return matrices([8, 8])(name, shape)

    form = form_of({"quant_method": "fp8", "weight_block_size": [8, 8]})
    require_same_logits(tmp_path, FAMILIES[family], encoder(family, matrix), form, 2)
