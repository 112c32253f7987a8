"""Forms of checkpoints that are rare: their answers are transformers' own."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rosebatch.core.errors import FlagError, RowError
from tests.helpers.against import assert_same
from tests.helpers.tiny_families import save_tiny_model, tiny_config


def _in_shards(folder):
    """Two files without an index, and a third in Mistral's own form, which is not read."""
    tensors = list(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    for number, part in enumerate((tensors[::2], tensors[1::2]), 1):
        save_file(dict(part), folder / f"model-0000{number}-of-00002.safetensors", {"format": "pt"})
    save_file({"norm.weight": torch.zeros(2)}, folder / "consolidated.safetensors")


def _edit(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.whole
@pytest.mark.parametrize(("model_type", "impl"), [("llama", "auto"), ("llama", "transformers"), ("olmoe", "auto")])
def test_shards_without_an_index(model_type, impl, tmp_path, transformers):
    """transformers' own loader finds none of them: the fallback refused what native models take."""
    model = save_tiny_model(tiny_config(model_type), tmp_path)
    _in_shards(tmp_path)
    assert_same(model, tmp_path, model_impl=impl)


@pytest.mark.whole
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float64])
@pytest.mark.parametrize("named", [True, False])
def test_plain_values_of_other_dtypes(dtype, named, tmp_path, transformers):
    """Without a scale they are numbers like others: they were refused, and so was "float64" in config.json."""
    save_tiny_model(tiny_config("qwen3"), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    stored = {name: tensor.to(dtype) if tensor.ndim > 1 else tensor for name, tensor in tensors.items()}
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    if named:
        _edit(tmp_path, dtype=str(dtype).removeprefix("torch."))
    assert_same(model, tmp_path)


def test_a_class_and_a_type_that_disagree(tmp_path, transformers):
    """transformers saves EXAONE 3 as class Llama with tensors of other names: its type says what it is."""
    model = save_tiny_model(tiny_config("exaone"), tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert (values["architectures"], values["model_type"]) == (["LlamaForCausalLM"], "exaone")
    assert_same(model, tmp_path)


@pytest.mark.whole
@pytest.mark.parametrize("rope_type", ["linear", "yarn"])
@pytest.mark.parametrize("impl", ["auto", "transformers"])
def test_scaled_positions_past_the_length_in_the_config(rope_type, impl, tmp_path, transformers):
    """Qwen2.5 reaches 128 k by a factor of 4 on 32 k, which its config.json has as its length."""
    config = tiny_config("llama")
    config.max_position_embeddings = 48
    config.rope_parameters = {"rope_type": rope_type, "rope_theta": 500.0, "factor": 4.0}
    if rope_type == "yarn":
        config.rope_parameters["original_max_position_embeddings"] = 48
    model = save_tiny_model(config, tmp_path)
    assert_same(model, tmp_path, model_impl=impl, max_model_len=192, lengths=(40, 185))
    with pytest.raises(FlagError, match="--max-model-len 193 must be between 2 and 192"):
        assert_same(model, tmp_path, model_impl=impl, max_model_len=193)
    with pytest.raises(RowError, match="48 are allowed"):
        assert_same(model, tmp_path, model_impl=impl, lengths=(60,))
