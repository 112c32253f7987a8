"""The text part of models of more than text answers as transformers' whole model does."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from rosebatch.model.text_parts import WHOLES
from tests.helpers.against import assert_same
from tests.helpers.wholes import save, tiny_whole

# transformers needs packages for their towers that the tests do not have.
_NO_TOWER = {"FastVlmForConditionalGeneration", "PerceptionLMForConditionalGeneration"}
# transformers leaves out the text part's factor on logits, which other engines and its own text class apply.
_SCALED = ("AyaVisionForConditionalGeneration", "Cohere2VisionForConditionalGeneration")
# transformers takes an image's mark in a text for padding: it must be no token that is generated.
_NO_MARKS = {"own": dict.fromkeys(("image_token_id", "video_token_id", "audio_token_id"), 211)}
_FAST = {"Qwen3VLForConditionalGeneration", "Qwen2VLForConditionalGeneration", "Idefics3ForConditionalGeneration"}


def case(name, *values, fast=False):
    return pytest.param(name, *values, marks=() if fast else pytest.mark.thorough)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "tied"),
    [case(n, t, fast=n in _FAST) for n in WHOLES if n not in _NO_TOWER for t in (None, not WHOLES[n].tied)],
)
def test_text_of_a_whole(name, tied, tmp_path, transformers):
    """Tensors have a prefix of their own, and the whole says whether embeddings are tied; both may be left out.

    A class says nothing, or the opposite of its default.
    """
    model = save(tiny_whole(name, tied, **(_NO_MARKS if name.startswith("Gemma4") else {})), tmp_path)
    scale = model.config.text_config.logit_scale if name in _SCALED else 1.0
    assert_same(model, tmp_path, scale=scale)


@pytest.mark.whole
@pytest.mark.parametrize(
    ("name", "text_type"),
    [
        case("LlavaForConditionalGeneration", "mistral", fast=True),
        case("LlavaNextForConditionalGeneration", "qwen2"),
        case("LlavaNextForConditionalGeneration", "phi3"),
        case("Mistral3ForConditionalGeneration", "llama"),
        case("InternVLForConditionalGeneration", "qwen3"),
        case("InternVLForConditionalGeneration", "qwen3_moe"),
        case("InternVLForConditionalGeneration", "gpt_oss"),
        case("Idefics3ForConditionalGeneration", "smollm3"),
    ],
)
def test_text_parts_of_other_types(name, text_type, tmp_path, transformers):
    """The part's own type counts, not the one that the class usually has."""
    assert_same(save(tiny_whole(name, text_type=text_type), tmp_path), tmp_path)


@pytest.mark.parametrize("turned", [True, False])
def test_experts_of_qwen3_vl_in_both_orders(turned, tmp_path, transformers):
    """Its files hold the matrices of all experts turned; transformers takes both."""
    model = tiny_whole("Qwen3VLMoeForConditionalGeneration")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    experts = [name for name in tensors if "mlp.experts." in name]
    assert experts
    for name in experts:
        rows = 56 if "gate_up" in name else 64
        if (tensors[name].shape[1] == rows) is turned:
            tensors[name] = tensors[name].mT.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same(model, tmp_path)


def test_qwen2_vl_of_transformers_4(tmp_path, transformers):
    """Its folders have no text_config: the fields are beside the others, and tensors have no prefix."""
    model = tiny_whole("Qwen2VLForConditionalGeneration", tied=True)
    model.save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    text = {key: value for key, value in values.pop("text_config").items() if key not in ("model_type", "dtype")}
    del text["rope_parameters"]
    text |= {"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
    (tmp_path / "config.json").write_text(json.dumps({**text, **values}))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {name.replace("model.language_model.", "model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert_same(type(model).from_pretrained(tmp_path, dtype=torch.float32).eval(), tmp_path)
