"""Whole folders with quantized matrices: tokens and their probabilities are those of a copy with the values."""

import json
from itertools import pairwise

import pytest
import torch
from safetensors.torch import load_file, save_file

from rosebatch import LLM, SamplingParams
from rosebatch.config.run import RunConfig
from rosebatch.core.errors import UserError
from rosebatch.model.source import find_model
from tests.helpers.small_llama import save_llama, save_tokenizer
from tests.model.quantization import test_awq, test_compressed_tensors, test_gptq
from tests.model.quantization.numbers import PLAIN
from tests.model.quantization.same_logits import CPU, OPS

HEAD = "lm_head.weight"
PROMPTS = ["The rose", "a", "Is it? It is, and so on and so on."]


def write(folder, matrix, quantization, *, taken=lambda name: name != HEAD, **values):
    """Two folders of a Llama: ``packed``, and ``dense`` with the values.

    Args:
        folder: gets both.
        matrix: see ``EncodeMatrix``.
        quantization: ``quantization_config``.
        taken: whether a module is quantized.
        values: of transformers' config.
    """
    for name in ("packed", "dense"):
        save_llama(folder / name, **values)
        save_tokenizer(folder / name)
    tensors = load_file(folder / "dense" / "model.safetensors")
    tensors.setdefault(HEAD, tensors["model.embed_tokens.weight"])
    packed, dense = {}, {}
    for name, tensor in tensors.items():
        is_plain = tensor.ndim < 2 or any(part in name for part in PLAIN if part != "lm_head")
        if is_plain or not taken(name):
            packed[name] = dense[name] = tensor
        else:
            found, values_of = matrix(name.removesuffix(".weight"), tuple(tensor.shape))
            packed |= found
            dense[name] = values_of.contiguous()
    config = json.loads((folder / "dense" / "config.json").read_text())
    save(folder / "packed", packed, {**config, "quantization_config": quantization})
    save(folder / "dense", dense, config)


def save(folder, tensors, config):
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def answers(folder, **settings):
    with LLM(folder, dtype="float32", device="cpu", **settings) as llm:
        outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=8, logprobs=3, ignore_eos=True))
    return [
        [{token: each.logprob for token, each in place.items()} for place in output.outputs[0].logprobs]
        for output in outputs
    ]


def require_same_answers(folder):
    """Both folders give the same answers, which vary."""
    expected = answers(folder / "dense")
    assert answers(folder / "packed") == expected
    assert any(first != second for first, second in pairwise(expected))


@pytest.mark.thorough
def test_a_head_of_its_own(tmp_path):
    """``lm_head`` true: the embedding was copied over a head that is quantized. The config is beside config.json."""
    write(tmp_path, test_gptq.matrices(), test_gptq.config_of(lm_head=True), taken=lambda name: True)
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    fields = config.pop("quantization_config")
    del fields["quant_method"]
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    (tmp_path / "packed" / "quantize_config.json").write_text(json.dumps(fields))
    require_same_answers(tmp_path)


def test_a_quantized_copy_of_a_tied_head(tmp_path):
    """The copy is used, and the embedding stays as it is. The folder with its values names none tied."""
    matrix, weights = test_compressed_tensors.words(4, 8)
    config = test_compressed_tensors.config_of(ignore=["model.embed_tokens"], **weights)
    write(tmp_path, matrix, config, taken=lambda name: True, tie_word_embeddings=True)
    dense = tmp_path / "dense" / "config.json"
    dense.write_text(json.dumps({**json.loads(dense.read_text()), "tie_word_embeddings": False}))
    require_same_answers(tmp_path)


@pytest.mark.thorough
def test_a_model_of_more_than_text(tmp_path):
    """The config is that of the text part, and lists modules by the names of the whole; some of a layer are plain."""
    listed = ["lm_head", "model.vision_tower", "model.language_model.layers.1"]
    config = {**test_awq.CONFIG, "modules_to_not_convert": listed}
    write(tmp_path, test_awq.matrix, config, taken=lambda name: "layers.0" in name)
    for form in ("packed", "dense"):
        folder = tmp_path / form
        tensors = load_file(folder / "model.safetensors")
        names = {name: name.replace("model.", "model.language_model.", 1) for name in tensors}
        text = json.loads((folder / "config.json").read_text())
        whole = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": text}
        vision = {"model.vision_tower.x.qweight": torch.zeros(1, dtype=torch.int32)}
        save(folder, {names[name]: tensor for name, tensor in tensors.items()} | vision, whole)
    require_same_answers(tmp_path)


def source(folder, **settings):
    return find_model(RunConfig.of(str(folder), device="cpu", **settings), CPU)


def test_a_config_that_is_missing(tmp_path):
    """Folders that lost ``quantization_config`` lacked a tensor, and nothing said why."""
    write(tmp_path, test_awq.matrix, None)
    message = r"have 'model\.layers\.0\.\S+\.qweight' in place of \S+, and config\.json has no quantization_config"
    with pytest.raises(UserError, match=message):
        source(tmp_path / "packed").build(OPS, CPU)
    config = json.loads((tmp_path / "packed" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8"}
    (tmp_path / "packed" / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"and config\.json has a quantization_config of another form"):
        source(tmp_path / "packed").build(OPS, CPU)


def test_weights_that_are_plain_all_the_same(tmp_path):
    """Reports called them quantized, and a GPU's memory was planned for a third of them."""
    write(tmp_path, test_awq.matrix, test_awq.CONFIG, taken=lambda name: False)
    message = "says that weights are quantized, but all are plain: take --quantization none"
    for look in (lambda found: found.build(OPS, CPU), lambda found: found.require_loadable()):
        with pytest.raises(UserError, match=message):
            look(source(tmp_path / "packed"))
        look(source(tmp_path / "packed", quantization="none"))


def test_random_weights_of_a_quantized_folder(tmp_path):
    """``--load-format dummy`` reads no tensor."""
    write(tmp_path, test_awq.matrix, test_awq.CONFIG)
    (tmp_path / "packed" / "model.safetensors").unlink()
    source(tmp_path / "packed", load_format="dummy").build(OPS, CPU)
