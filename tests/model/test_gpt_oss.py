"""gpt-oss's checkpoints: MXFP4, which the Hub has, and 16-bit matrices, which transformers writes."""

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rosebatch.core.errors import UserError
from rosebatch.model.hf.config import parse_model_config
from rosebatch.model.quantization.formats.mxfp4 import MXFP4
from rosebatch.model.quantization.forms import load_weight
from rosebatch.model.weights import SafetensorsWeights
from tests.engine.family_models import FAMILIES
from tests.model.quantization.same_logits import require_same_logits

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


def expand(blocks, scales):
    """The first of a byte's two codes is in its low half."""
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2).long()
    return (torch.tensor(VALUES)[codes] * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).to(torch.bfloat16)


def test_both_forms_give_the_same_matrices(tmp_path):
    """MXFP4 has rows of outputs, transformers' form rows of inputs; columns of MXFP4 are cut within a block of 32."""
    generator = torch.Generator().manual_seed(0)
    blocks = torch.randint(256, (3, 8, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(125, 130, (3, 8, 3), generator=generator, dtype=torch.uint8)
    dense = expand(blocks, scales)
    forms = {"packed": {"m_blocks": blocks, "m_scales": scales}, "plain": {"m": dense.transpose(1, 2).contiguous()}}
    for form, tensors in forms.items():
        (tmp_path / form).mkdir()
        save_file(tensors, tmp_path / form / "model.safetensors")
        source = SafetensorsWeights(tmp_path / form, torch.bfloat16, torch.device("cpu"), MXFP4.of({}))
        weight = load_weight(source, "m", (3, 8, 96), transposed=True)
        rows = np.array([2, 4, 3, 5])
        each = {
            "whole": (weight, dense),
            "rows": (weight.rows(rows), dense[:, rows]),
            "columns": (weight.columns(range(20, 88)).columns(range(14, 60)), dense[:, :, 34:80]),
            "joined": (weight.join([weight]).rows(rows + 4), torch.cat([dense, dense], 1)[:, rows + 4]),
            "stacked": (weight.stack([weight]), torch.stack([dense, dense])),
        }
        for case, (found, expected) in each.items():
            assert (found.shape, found.dense().dtype) == (expected.shape, torch.bfloat16)
            assert torch.equal(found.dense(), expected), (form, case)


def test_the_hubs_config():
    """It says nothing of its dtype, and its quantization is expanded; another one is refused."""
    config = parse_model_config(CONFIG, "config.json")
    assert (config.dtype, config.experts.num_experts, config.sliding_windows) == ("bfloat16", 128, (128, 0))
    assert (config.rope.scaling, config.rope.theta, config.rope.truncate) == ("yarn", 150000.0, False)
    with pytest.raises(UserError, match="quantization_config: quant_method 'hqq' is not supported"):
        parse_model_config({**CONFIG, "quantization_config": {"quant_method": "hqq"}}, "config.json")
    with pytest.raises(UserError, match=r"swiglu_limit other than 7\.0"):
        parse_model_config({**CONFIG, "swiglu_limit": 5.0}, "config.json")


def encoded(name, values):
    """Experts as the Hub has them; transformers' form has rows of inputs."""
    if values.ndim < 3:
        return {}, values
    shape = (len(values), values.shape[2], -(-values.shape[1] // 32))
    generator = torch.Generator().manual_seed(len(name))
    blocks = torch.randint(256, (*shape, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(118, 122, shape, generator=generator, dtype=torch.uint8)
    dense = expand(blocks, scales).float().mT
    return {f"{name}_blocks": blocks, f"{name}_scales": scales}, dense


@pytest.mark.parametrize("size", [1, 2])
def test_ranks_that_begin_inside_of_a_block(tmp_path, size):
    """Two ranks have 48 columns of 96 each, in blocks of 32: scales of the wrong block cost 4 points of GPQA."""
    config = FAMILIES["gpt_oss"]
    experts = msgspec.structs.replace(config.experts, expert_size=96)
    config = msgspec.structs.replace(config, experts=experts)
    require_same_logits(tmp_path, config, encoded, MXFP4.of({}), size)
