"""fp8 weights with scales for matrices, rows or blocks, as DeepSeek, Qwen and Mistral publish them."""

import pytest
import torch
from safetensors.torch import save_file

from rosebatch.core.errors import UserError
from rosebatch.model.quantization.formats import form_of, load_weight
from rosebatch.model.weights import SafetensorsWeights
from tests.engine.family_models import FAMILIES
from tests.model.quantization.same_logits import CPU, require_same_logits

PLAIN = ("embed", "lm_head", "norm", "mlp.gate.", "router")


def encoder(block, scale_dtype=torch.float32, name_of_scale="weight_scale_inv"):
    """Blocks are cut off at the ends; None: one scale a matrix."""

    def encode(name, values):
        if values.ndim != 2 or any(part in name for part in PLAIN):
            return {}, values
        rows, columns = values.shape
        high, wide = block or (rows, columns)
        grid = -(-rows // high), -(-columns // wide)
        generator = torch.Generator().manual_seed(len(name) + rows)
        scale = (torch.rand(grid, generator=generator) + 0.1).to(scale_dtype)
        each = scale.float().repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        numbers = (values / each).to(torch.float8_e4m3fn)
        module = name.removesuffix(".weight")
        stored = scale if block else scale.reshape(())
        return {name: numbers, f"{module}.{name_of_scale}": stored}, numbers.float() * each

    return encode


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", ["smollm3", "glm4", "qwen3_moe", "mixtral", "phi3"])
@pytest.mark.parametrize("block", [[8, 8], [5, 7], [128, 128], None])
def test_blocks_are_cut_joined_and_reordered(tmp_path, name, block, size):
    """Blocks that are cut off, shards that begin inside of one, and projections with scales of their own."""
    form = form_of({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block})
    require_same_logits(tmp_path, FAMILIES[name], encoder(block), form, size)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e8m0fnu])
@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale"])
def test_a_scale_is_a_factor_of_any_dtype(tmp_path, dtype, scale):
    """Its name says inverse. Others were read as fp32, and bytes are exponents."""
    form = form_of({"quant_method": "fp8", "weight_block_size": [8, 8]})
    require_same_logits(tmp_path, FAMILIES["smollm3"], encoder([8, 8], dtype, scale), form, 1)


def test_what_contradicts(tmp_path):
    """Values of other scales would be another model, without a word."""
    tensors, _ = encoder([8, 8])("x.weight", torch.randn(32, 24))
    save_file(tensors, tmp_path / "model.safetensors")

    def load(**config):
        form = form_of({"quant_method": "fp8", **config})
        return load_weight(SafetensorsWeights(tmp_path, torch.float32, CPU, form), "x.weight", (32, 24))

    assert load(weight_block_size=[8, 8], modules_to_not_convert=["y", "xx"]).shape == (32, 24)
    with pytest.raises(UserError, match=r"modules_to_not_convert has 'x', and x is quantized"):
        load(weight_block_size=[8, 8], modules_to_not_convert=["x"])
    with pytest.raises(
        UserError, match=r"groups of \(16, 16\) need .* \(2, 2\), and .*'x\.weight_scale_inv' has \(4, 3\)"
    ):
        load(weight_block_size=[16, 16])


@pytest.mark.parametrize(
    ("field", "value"),
    [("weight_block_size", [128]), ("weight_block_size", [0, 128]), ("fmt", "e3m4"), ("expert_dtype", "fp4")],
)
def test_what_is_not_served(field, value):
    """It is one line that names the field."""
    with pytest.raises(ValueError, match=f"quantization_config: {field} .* is not supported"):
        form_of({"quant_method": "fp8", field: value})
