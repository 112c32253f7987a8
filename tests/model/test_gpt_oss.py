"""gpt-oss's checkpoints: MXFP4, which the Hub has, and 16-bit matrices, which transformers writes."""

import json

import pytest
import torch
from safetensors.torch import save_file

from rosebatch.core.errors import UserError
from rosebatch.model.families.gpt_oss import _load_matrices
from rosebatch.model.hf_config import parse_model_config
from rosebatch.model.mxfp4 import expand
from rosebatch.model.weights import SafetensorsWeights

VALUES = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "quantization_config": {"quant_method": "mxfp4"},
}


def test_every_code_and_scale():
    """Halves of a byte in the wrong order, or a scale off by one, would still give numbers."""
    blocks = torch.arange(256, dtype=torch.uint8).view(2, 8, 16)
    scales = torch.arange(120, 136, dtype=torch.uint8).view(2, 8)
    out = expand(blocks, scales, torch.bfloat16)
    assert out.shape == (2, 256)
    expected = [
        [VALUES[code] * 2.0 ** (int(scales[row, i // 16]) - 127) for i in range(128) for code in codes(row * 128 + i)]
        for row in range(2)
    ]
    assert torch.equal(out.double(), torch.tensor(expected, dtype=torch.float64))


def codes(byte):
    return byte % 16, byte // 16


@pytest.mark.parametrize("in_turn", [True, False])
def test_both_forms_give_the_same_matrices(in_turn, tmp_path):
    """MXFP4 has rows of outputs, transformers' form rows of inputs; gate and up take turns in both."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 8, 2, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(125, 130, (3, 8, 2), generator=generator, dtype=torch.uint8)
    dense = expand(blocks, scales, torch.bfloat16)
    bias = torch.zeros(3, 8, dtype=torch.bfloat16)
    expected = torch.cat((dense[:, ::2], dense[:, 1::2]), 1) if in_turn else dense
    forms = {"packed": {"m_blocks": blocks, "m_scales": scales}, "plain": {"m": dense.transpose(1, 2).contiguous()}}
    for form, tensors in forms.items():
        (tmp_path / form).mkdir()
        save_file({**tensors, "m_bias": bias}, tmp_path / form / "model.safetensors")
        weights = SafetensorsWeights(tmp_path / form, torch.bfloat16, torch.device("cpu"))
        out = _load_matrices(weights, "m", (3, 8, 64), in_turn=in_turn, own=range(8 if in_turn else 64))
        assert out.dtype == torch.bfloat16
        assert torch.equal(out, expected), form
        # A part for one of several processes; columns of the packed form are cut within a block of 32.
        own = range(2, 6) if in_turn else range(20, 44)
        out = _load_matrices(weights, "m", (3, 8, 64), in_turn=in_turn, own=own)
        part = torch.cat((dense[:, 2:6:2], dense[:, 3:6:2]), 1) if in_turn else dense[:, :, 20:44]
        assert torch.equal(out, part), form


def test_the_hubs_config():
    """It says nothing of its dtype, and its quantization is expanded; another one is refused."""
    config = parse_model_config(CONFIG, "config.json")
    assert (config.dtype, config.experts.num_experts, config.sliding_windows) == ("bfloat16", 128, (128, 0))
    assert (config.rope.scaling, config.rope.theta, config.rope.truncate) == ("yarn", 150000.0, False)
    with pytest.raises(UserError, match="quantized checkpoints are not supported"):
        parse_model_config({**CONFIG, "quantization_config": {"quant_method": "awq"}}, "config.json")
    with pytest.raises(UserError, match=r"swiglu_limit other than 7\.0"):
        parse_model_config({**CONFIG, "swiglu_limit": 5.0}, "config.json")
    llama = json.loads(json.dumps(CONFIG)) | {"architectures": ["LlamaForCausalLM"]}
    with pytest.raises(UserError, match="quantized checkpoints are not supported"):
        parse_model_config(llama, "config.json")
