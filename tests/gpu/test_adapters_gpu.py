"""Adapters that are merged on a GPU."""

import pytest
import torch
from safetensors.torch import save_file

from rosebatch.model.adapters.adapter import read_adapter
from rosebatch.model.quantization.forms import load_weight
from rosebatch.model.weights import SafetensorsWeights
from tests.model.adapters.written import embedding_pair, experts_pair, numbers, pair, write_adapter

pytestmark = pytest.mark.gpu
SHAPES = {"a.proj.weight": (96, 64), "a.table.weight": (96, 64), "a.experts.down_proj": (4, 96, 64)}
SHAPES |= {"a.tokens.weight": (96, 64)}
ROWS = {"a.tokens.token_adapter.trainable_tokens_delta": numbers("rows", 3, 64)}


@pytest.mark.parametrize("part", ["whole", "rows", "columns"])
@pytest.mark.parametrize("name", SHAPES)
def test_merged_weights_are_those_of_a_cpu(device, tmp_path, name, part):
    """Sums have no rounding, so products in another order, or in fewer bits, would show."""
    shape = SHAPES[name]
    save_file({name: numbers("w", *shape), "a.proj.bias": numbers("bias", 96)}, tmp_path / "model.safetensors")
    linear, table, experts = pair("a.proj", 96, 64)[0], embedding_pair("a.table", 96, 64)[0], {}
    if "experts" in name:
        experts = experts_pair("a.experts", *shape)[0]
    tensors = {**linear, **table, **experts, **ROWS, "a.proj.lora_B.bias": numbers("b", 96)}
    folder = write_adapter(tmp_path / "adapter", tensors, trainable_token_indices=[90, 2, 40])

    def load(on):
        weights = SafetensorsWeights(tmp_path, torch.bfloat16, on, adapter=read_adapter("a", folder))
        weight = load_weight(weights, name, shape)
        cut = {"whole": weight, "rows": weight.rows(range(32, 96)), "columns": weight.columns(range(16, 48))}[part]
        return cut.dense(), weights.get("a.proj.bias", (96,))

    for found, expected in zip(load(device), load(torch.device("cpu")), strict=True):
        assert found.device.type == device.type
        assert torch.equal(found.cpu(), expected)
