"""Biases that a checkpoint has, and its family or config.json does not."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from rosebatch.core.errors import UserError
from tests.helpers.small_llama import save_llama
from tests.helpers.tiny_engines import engine_of

NAME = "model.layers.1.mlp.down_proj.bias"


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_a_bias_that_no_layer_adds(value, tmp_path):
    """It was dropped without a word, and answers were others. Writers of GPTQ store zeros, which add nothing."""
    save_llama(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, NAME: torch.full((32,), value)}, tmp_path / "model.safetensors")
    if value:
        with pytest.raises(UserError, match=f"^{NAME}: the weights have it, and by config.json"):
            engine_of(tmp_path)
    else:
        engine_of(tmp_path)
