"""GGUF files, written here from random transformers models, against those models: weights and broken files."""

import json
import struct

import gguf
import numpy as np
import pytest
import torch
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM

from rosebatch.config.run import RunConfig
from rosebatch.core.errors import UserError
from rosebatch.core.request import Request
from rosebatch.core.sampling_params import SamplingParams
from rosebatch.launch.launch import launch
from rosebatch.model.gguf.cache import converted_folder
from rosebatch.model.gguf.convert import convert, read_shape
from tests.model.gguf_files import END, MODELS, random_model

pytestmark = pytest.mark.usefixtures("cache")


def logits(model, token_ids):
    with torch.inference_mode():
        return model(input_ids=torch.tensor([token_ids])).logits[0]


def greedy(path, prompts, count):
    """What rosebatch generates in fp32."""
    engine = launch(RunConfig(model=str(path), device="cpu", dtype="float32", block_size=4, max_num_seqs=8)).engine
    sampling = SamplingParams(max_tokens=count, ignore_eos=True)
    requests = [Request(i, tuple(prompt), sampling) for i, prompt in enumerate(prompts)]
    return {c.request.id: list(c.token_ids) for c in engine.run(requests)}


PROMPTS = [[5], [7, 200, 9, 31, 18], list(range(30, 49))]


@pytest.mark.matrix
@pytest.mark.parametrize("name", MODELS)
def test_a_converted_model_is_the_original(write_gguf, name):
    """Names, transposes, the order of q and k for RoPE, biases and config numbers are exact to the last bit.

    The trained length of YaRN was not read, so its positions were wrong without a word. So were its slopes, biases of
    the MLP, and divisors of positions: a formula with other numbers was guessed. Those are rounded in the file.
    """
    original = random_model(name)
    folder = converted_folder(write_gguf(name, original), torch.float32)
    converted = AutoModelForCausalLM.from_pretrained(folder).eval()
    assert type(converted) is type(original)
    assert converted.dtype == torch.float32
    token_ids = [5, 200, 9, 31, 18, END, 0, 77]
    differences = logits(converted, token_ids) - logits(original, token_ids)
    assert differences.abs().max() <= (1e-5 if "3.1" in name else 0)
    generated = greedy(folder, PROMPTS, 10)
    for index, prompt in enumerate(PROMPTS):
        forced = logits(original, prompt + generated[index]).argmax(-1)
        assert generated[index] == forced[len(prompt) - 1 : -1].tolist()


QUANTIZED = {
    "q_proj": gguf.GGMLQuantizationType.Q8_0,
    "down_proj": gguf.GGMLQuantizationType.Q4_1,
    "embed_tokens": gguf.GGMLQuantizationType.Q5_0,
    "up_proj": gguf.GGMLQuantizationType.F16,
    "v_proj": gguf.GGMLQuantizationType.BF16,
}


def test_quantized_tensors(write_gguf):
    """They are dequantized as the gguf package does it, before the rows of q are reordered."""
    original = random_model("llama")
    path = write_gguf("llama", original, quantized=QUANTIZED)
    with torch.no_grad():
        for name, parameter in original.named_parameters():
            for part, kind in QUANTIZED.items():
                if part in name:
                    values = dequantize(quantize(parameter.numpy(), kind), kind)
                    assert not np.array_equal(values, parameter.numpy())
                    parameter.copy_(torch.from_numpy(values))
    converted = AutoModelForCausalLM.from_pretrained(converted_folder(path, torch.float32)).eval()
    assert torch.equal(logits(converted, PROMPTS[1]), logits(original, PROMPTS[1]))


def test_weights_are_rounded_once(write_gguf, toy):
    """bf16 must come straight from the dequantized fp32 values."""
    folder = converted_folder(write_gguf("llama", toy), torch.bfloat16)
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"
    converted = AutoModelForCausalLM.from_pretrained(folder)
    expected = {name: tensor.to(torch.bfloat16) for name, tensor in toy.state_dict().items()}
    assert converted.dtype == torch.bfloat16
    for name, tensor in converted.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_large_models_are_written_in_shards(write_gguf, toy, monkeypatch, tmp_path):
    """No tensor is lost between shards: they give the same tokens as one file."""
    path = write_gguf("llama", toy)
    whole, shards = tmp_path / "whole", tmp_path / "shards"
    whole.mkdir()
    shards.mkdir()
    convert(path, torch.float32, whole)
    monkeypatch.setattr("rosebatch.model.gguf.convert._SHARD_BYTES", 50_000)
    convert(path, torch.float32, shards)
    assert len(list(shards.glob("*.safetensors"))) > 2
    assert greedy(shards, PROMPTS, 8) == greedy(whole, PROMPTS, 8)


def test_both_end_tokens_end(write_gguf, toy):
    """Chat models have an end of turn and an end of text: generation stops at either."""
    folder = converted_folder(write_gguf("llama", toy, eot=302), torch.float32)
    assert json.loads((folder / "generation_config.json").read_text()) == {"eos_token_id": [END, 302]}
    assert launch(RunConfig(model=str(folder), device="cpu")).engine.eos_token_ids == {END, 302}


# Files that cannot be used


@pytest.mark.parametrize(
    "content",
    [b"", b"GGUF", b"\x00" * 1000, b"not a gguf file" * 100, b"GGUF\x03\x00\x00\x00" + b"\xff" * 100],
    ids=["empty", "magic-only", "zeros", "text", "endless-counts"],
)
def test_a_file_that_is_no_gguf(tmp_path, content):
    """Whatever the gguf package raises on garbage, the user gets one line."""
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.gguf: not a readable GGUF file"):
        converted_folder(tmp_path / "model.gguf", torch.float32)


def test_a_truncated_file(write_gguf, toy, tmp_path):
    """A download may stop in the header, the metadata, the list of tensors or the tensors."""
    whole = write_gguf("llama", toy).read_bytes()
    cut = tmp_path / "cut.gguf"
    for length in [*range(0, 600, 23), *range(600, len(whole), len(whole) // 40), len(whole) - 40]:
        cut.write_bytes(whole[:length])
        with pytest.raises(UserError, match=r"cut\.gguf: not a readable GGUF file"):
            converted_folder(cut, torch.float32)


def test_an_unknown_architecture(write_gguf):
    """The message names it and says where those are that are supported."""
    with pytest.raises(UserError, match=r"'mamba' is not supported; docs/models\.md lists what is"):
        converted_folder(write_gguf(architecture="mamba"), torch.float32)


def test_one_of_several_files(write_gguf, toy, monkeypatch):
    """The first of several parts was converted as if it were the whole model."""
    add_rope = gguf.GGUFWriter.add_rope_freq_base

    def add_more(self, value):
        add_rope(self, value)
        self.add_uint16("split.count", 2)

    monkeypatch.setattr(gguf.GGUFWriter, "add_rope_freq_base", add_more)
    with pytest.raises(UserError, match=r"model\.gguf: one of several parts: join them with llama-gguf-split --merge"):
        converted_folder(write_gguf("llama", toy), torch.float32)


def test_a_file_without_embeddings(write_gguf, toy, monkeypatch):
    """It was "not a readable GGUF file", with the tensor's name alone."""
    add = gguf.GGUFWriter.add_tensor

    def add_others(self, name, *args, **kwargs):
        if name != "token_embd.weight":
            add(self, name, *args, **kwargs)

    monkeypatch.setattr(gguf.GGUFWriter, "add_tensor", add_others)
    with pytest.raises(UserError, match=r"model\.gguf: the tensor token_embd\.weight is missing$"):
        converted_folder(write_gguf("llama", toy), torch.float32)


def test_missing_metadata(write_gguf, toy, monkeypatch):
    """The message names the key as the file would have it."""
    monkeypatch.setattr(gguf.GGUFWriter, "add_block_count", lambda self, count: None)
    with pytest.raises(UserError, match=r"'llama\.block_count' is missing"):
        converted_folder(write_gguf("llama", toy), torch.float32)


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_more_layers_than_tensors(family, write_gguf, toy, monkeypatch):
    """A damaged count made lists of 2^40 kinds of layers: gigabytes, then a MemoryError."""
    add = gguf.GGUFWriter.add_block_count
    monkeypatch.setattr(gguf.GGUFWriter, "add_block_count", lambda self, count: add(self, 2**31))
    with pytest.raises(UserError, match=r"block_count' is 2147483648, and the file has \d+ tensors"):
        converted_folder(write_gguf(family, toy), torch.float32)


@pytest.mark.parametrize(("kind", "shown"), [(None, "I8"), (4711, "4711")])
def test_a_kind_of_tensor_that_cannot_be_dequantized(kind, shown, write_gguf, toy):
    """New kinds appear every few months. The line had no tensor, and ``check``, which reads no weights, had no line."""
    path = write_gguf("llama", toy, quantized={"up_proj": gguf.GGMLQuantizationType.I8})
    if kind is not None:
        # The type of a tensor follows the sizes of its two dimensions.
        content, name = bytearray(path.read_bytes()), b"blk.0.ffn_up.weight"
        struct.pack_into("<I", content, content.index(name) + len(name) + 4 + 2 * 8, kind)
        path.write_bytes(content)
    for read in (read_shape, converted_folder):
        with pytest.raises(UserError, match=rf"model\.gguf: .*tensor 'blk\.0\.ffn_up\.weight' is of type {shown}\b"):
            read(path, torch.float32)


def test_a_file_without_tensors(write_gguf):
    """llama.cpp also has files with a vocabulary alone."""
    with pytest.raises(UserError):
        converted_folder(write_gguf("llama"), torch.float32)
