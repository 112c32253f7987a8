"""Which matrix makes logits: as transformers, by what is stored first, and by what config.json says."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.against import assert_same

_EMBEDDING = {"gpt2": "transformer.wte.weight"}
# What is stored of the two, and whether the head has values of its own.
_STORED = {
    "embedding": ({"embedding"}, False),
    "head": ({"head"}, False),
    "both alike": ({"embedding", "head"}, False),
    "both": ({"embedding", "head"}, True),
}
_CASES = [
    ("llama3-rope-biases-tied", "head"),
    *((name, stored) for stored in _STORED for name in ("gpt2", "gemma3", "cohere", "qwen3", "smollm3")),
    ("llama3-rope-biases-tied", "both"),
]


@pytest.mark.parametrize(("name", "stored"), _CASES)
def test_tied_weights(name, stored, goldens, tmp_path, transformers):
    """A stored head that differs was not read, and weights by the name of the head alone were refused."""
    folder = goldens(name).folder
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    assert json.loads((folder / "config.json").read_text()).get("tie_word_embeddings", True)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors.pop(_EMBEDDING.get(name, "model.embed_tokens.weight"))
    tensors.pop("lm_head.weight", None)
    names, differs = _STORED[stored]
    if "embedding" in names:
        tensors[_EMBEDDING.get(name, "model.embed_tokens.weight")] = embedding
    if "head" in names:
        tensors["lm_head.weight"] = embedding.flip(0).contiguous() if differs else embedding.clone()
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    tied = torch.equal(model.get_output_embeddings().weight, model.get_input_embeddings().weight)
    assert tied is not differs
    assert_same(model, tmp_path)
    assert_same(model, tmp_path, model_impl="transformers")
