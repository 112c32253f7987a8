"""``check`` finds what a run would find in the headers of a model's files, without reading its weights."""

import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.quantize_folder import quantize
from rosebatch.config.run import RunConfig
from rosebatch.core.errors import UserError
from rosebatch.model.dry_load import HEADERS, require_loadable
from rosebatch.model.source import find_model
from rosebatch.model.weight_files import has_weight_files
from rosebatch.model.weights import SafetensorsWeights
from tests.engine.family_models import FAMILIES
from tests.helpers.small_llama import save_llama
from tests.model.odd_folders import INDEX, cases, write_good
from tests.model.quantization import test_awq, test_fp8, test_gptq
from tests.model.quantization.same_logits import CPU, OPS, write_both
from tests.model.quantization.test_folders import write


@pytest.mark.matrix
@pytest.mark.parametrize("name", FAMILIES)
def test_good_files(name, tmp_path):
    """Of every family; each tensor is read."""
    folder, _ = write_both(tmp_path, FAMILIES[name], lambda _, values: ({}, values))
    weights = SafetensorsWeights(folder, torch.bfloat16, HEADERS)
    require_loadable(FAMILIES[name], weights)
    assert weights.unread == []


@pytest.mark.parametrize("form", ["nvfp4", "fp8-block"])
def test_a_scale_that_is_one_number(form, tmp_path):
    """Of a whole matrix, or of its only block: its value met scales that had no values, and ``check`` ended."""
    save_llama(tmp_path / "plain", hidden_size=128, intermediate_size=128)
    quantize(tmp_path / "plain", form, tmp_path / "quantized")
    find_model(RunConfig(model=str(tmp_path / "quantized"), device="cpu"), CPU).require_loadable()


@pytest.mark.parametrize("equal", [True, False])
def test_a_tied_head_that_is_stored(equal, tmp_path):
    """It was compared with the embedding, which has no values there: ``check`` ended with an unexpected error."""
    save_llama(tmp_path, tie_word_embeddings=True)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    head = tensors["model.embed_tokens.weight"].clone()
    save_file({**tensors, "lm_head.weight": head if equal else head + 1}, file, {"format": "pt"})
    assert source_of(tmp_path).require_loadable() == []


def line_of(call, *arguments):
    """The line of a refusal, or None."""
    try:
        call(*arguments)
    except UserError as error:
        return str(error)
    return None


def source_of(folder, **settings):
    """Of a folder; None if its config is refused."""
    try:
        return find_model(RunConfig(model=str(folder), device="cpu", **settings), CPU)
    except UserError:
        return None


@pytest.mark.thorough
def test_files_that_are_odd(tmp_path):
    """What is missing, of another shape, or cut: ``check`` said that all rows can be served."""
    refused = 0
    for case in cases():
        if case.file in ("model.safetensors", INDEX):
            folder = tmp_path / "model"
            write_good(case.kind, folder)
            case.change(folder / case.file)
            source = source_of(folder)
            if source is not None and has_weight_files(folder):
                found = line_of(source.build, OPS, CPU)
                assert line_of(source.require_loadable) == found, case.name
                refused += found is not None
            shutil.rmtree(folder)
    assert refused > 20


def without(*ends):
    def change(tensors):
        for name in [name for name in tensors if name.endswith(ends)]:
            del tensors[name]

    return change


def of_another_shape(end):
    def change(tensors):
        for name in [name for name in tensors if name.endswith(end)]:
            tensors[name] = tensors[name][:-1].clone()

    return change


def nothing(tensors):
    pass


GPTQ = test_gptq.matrices(symmetric=True), test_gptq.config_of(sym=True)
AWQ = test_awq.matrix, test_awq.CONFIG
FP8 = test_fp8.matrices([8, 8]), {"quant_method": "fp8", "weight_block_size": [8, 8]}


@pytest.mark.parametrize(
    ("form", "fields", "change", "message"),
    [
        (GPTQ, {"bits": 8}, nothing, "bits is 8, and .*qweight has shape"),
        (GPTQ, {"group_size": 16}, nothing, "group_size is 16, and .* has shape"),
        (GPTQ, {}, without("down_proj.scales"), "weights have no tensor .*down_proj.scales"),
        (GPTQ, {}, of_another_shape("up_proj.qzeros"), "qzeros.* has shape"),
        (AWQ, {"group_size": 16}, nothing, "group_size is 16, and .* has shape"),
        (AWQ, {}, without("up_proj.qzeros"), "up_proj.qzeros.* is missing|no tensor .*up_proj.qzeros"),
        (AWQ, {}, of_another_shape("q_proj.qweight"), "qweight.* has shape"),
        (FP8, {"weight_block_size": [16, 16]}, nothing, "groups of .* need scales of shape"),
        (FP8, {"modules_to_not_convert": ["up_proj"]}, nothing, "modules_to_not_convert has 'up_proj'"),
        (FP8, {}, without("o_proj.weight_scale_inv"), "there are no scales for it"),
        (FP8, {}, of_another_shape("o_proj.weight"), "has shape .*, config says"),
        (FP8, {}, of_another_shape("norm.weight"), "has shape .*, config says"),
    ],
)
def test_configs_that_contradict_the_tensors(form, fields, change, message, tmp_path):
    """In the words of a run."""
    matrix, config = form
    write(tmp_path, matrix, {**config, **fields})
    folder = tmp_path / "packed"
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    source = source_of(folder)
    found = line_of(source.require_loadable)
    assert found == line_of(source.build, OPS, CPU)
    assert re.search(message, found)


def test_no_matrix_is_read(tmp_path, monkeypatch):
    """Headers of a model that does not fit the memory are still looked at."""
    write(tmp_path, *AWQ)
    read = []
    monkeypatch.setattr("rosebatch.model.weights._read", lambda *_: read.append(0))
    source_of(tmp_path / "packed").require_loadable()
    assert not read


def test_a_run_names_what_nobody_reads(tmp_path, capsys):
    """Only ``check`` did: of a checkpoint with more than its family has, a run made another model without a word."""
    save_llama(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "model.layers.0.self_attn.sink": torch.zeros(3)}, file, {"format": "pt"})
    source = find_model(RunConfig(model=str(tmp_path), device="cpu"), CPU)
    capsys.readouterr()
    for _ in range(2):
        source.build(OPS, CPU)
    told = "not read: 1 tensor of the weights, such as model.layers.0.self_attn.sink"
    assert capsys.readouterr().err == f"rosebatch: warning: {source.name}: {told}\n"
