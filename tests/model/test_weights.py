"""Weights from folders that are complete, sharded, bare or broken, and random weights."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from rosebatch.core.errors import UserError
from rosebatch.model.random_weights import RandomWeights
from rosebatch.model.weights import SafetensorsWeights, Take

CPU = torch.device("cpu")
FIRST = {"model.embed_tokens.weight": torch.randn(5, 3), "model.norm.weight": torch.randn(3)}
SECOND = {"lm_head.weight": torch.randn(5, 3)}


def source(folder, dtype=torch.float32):
    return SafetensorsWeights(folder, dtype, CPU)


def write_shards(folder):
    save_file(FIRST, folder / "model-00001-of-00002.safetensors")
    save_file(SECOND, folder / "model-00002-of-00002.safetensors")


def write_index(folder):
    weight_map = dict.fromkeys(FIRST, "model-00001-of-00002.safetensors")
    weight_map |= dict.fromkeys(SECOND, "model-00002-of-00002.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def assert_all_there(weights):
    for name, tensor in {**FIRST, **SECOND}.items():
        assert torch.equal(weights.get(name, tuple(tensor.shape)), tensor)


def test_one_file(tmp_path):
    """A single file gives every tensor."""
    save_file({**FIRST, **SECOND}, tmp_path / "model.safetensors")
    assert_all_there(source(tmp_path))


def test_shards_with_an_index(tmp_path):
    """Every tensor is found in its shard."""
    write_shards(tmp_path)
    write_index(tmp_path)
    assert_all_there(source(tmp_path))


def test_shards_without_an_index(tmp_path):
    """Shards are found without the index file too."""
    write_shards(tmp_path)
    assert_all_there(source(tmp_path))


def test_a_tensor_in_two_shards(tmp_path):
    """The last file by name won. The index decides; without one, nobody can."""
    write_shards(tmp_path)
    save_file({**SECOND, "model.norm.weight": torch.zeros(3)}, tmp_path / "model-00002-of-00002.safetensors")
    with pytest.raises(
        UserError, match=r"'model.norm.weight' is in model-00001-of-00002.* and in model-00002-of-00002"
    ):
        source(tmp_path)
    write_index(tmp_path)
    assert_all_there(source(tmp_path))


def test_an_index_that_names_the_wrong_shard(tmp_path):
    """The tensor counted as missing; a model without its head was said to embed only."""
    write_shards(tmp_path)
    write_index(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(index.read_text().replace("00001-of", "00002-of"))
    save_file({"other": torch.zeros(3)}, tmp_path / "model-00002-of-00002.safetensors")
    save_file({**FIRST, **SECOND}, tmp_path / "model-00001-of-00002.safetensors")
    index.write_text(index.read_text().replace('"model-00002', '"model-00001', 1))
    assert_all_there(source(tmp_path))


def test_shards_of_two_sets(tmp_path):
    """A folder that was written twice was read as one model of both."""
    write_shards(tmp_path)
    for number in (1, 2, 3):
        save_file(SECOND, tmp_path / f"model-0000{number}-of-00003.safetensors")
    with pytest.raises(UserError, match=r"weight files of several sets, of 2 and of 3$"):
        source(tmp_path)


@pytest.mark.parametrize("sharded", [False, True])
def test_other_files_beside_the_model_are_left_alone(tmp_path, sharded):
    """Mistral's folders hold all weights twice under other names, and adapters may be there."""
    if sharded:
        write_shards(tmp_path)
        write_index(tmp_path)
    else:
        save_file({**FIRST, **SECOND}, tmp_path / "model.safetensors")
    save_file({"lm_head.weight": torch.zeros(5, 3)}, tmp_path / "z_adapter.safetensors")
    (tmp_path / "consolidated.safetensors").write_bytes(b"broken")
    assert_all_there(source(tmp_path))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_come_in_the_dtype_of_the_run(tmp_path, dtype):
    """The checkpoint's dtype must not leak into the run."""
    save_file({k: v.to(torch.bfloat16) for k, v in FIRST.items()}, tmp_path / "model.safetensors")
    tensor = source(tmp_path, dtype).get("model.norm.weight", (3,))
    assert torch.equal(tensor, FIRST["model.norm.weight"].to(torch.bfloat16).to(dtype))


def test_weights_are_converted_before_they_are_on_the_device(tmp_path, monkeypatch):
    """A GPU held fp32 weights beside those of the run, and what they left free was lost to the KV cache."""
    save_file(FIRST, tmp_path / "model.safetensors")
    weights, moves, to = source(tmp_path, torch.bfloat16), [], torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *a, **k: moves.append((a, k)) or to(self, *a, **k))
    weights.get("model.norm.weight", (3,))
    assert moves == [((), {"device": CPU, "dtype": torch.bfloat16})]


def test_weights_are_widened_on_the_device(tmp_path, monkeypatch):
    """Twice the bytes moved for a matrix that an adapter changes in fp32."""
    save_file({name: values.to(torch.bfloat16) for name, values in FIRST.items()}, tmp_path / "model.safetensors")
    weights, moves, to = source(tmp_path, torch.bfloat16), [], torch.Tensor.to
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *a, **k: moves.append((a, k)) or to(self, *a, **k))
    assert weights.get("model.norm.weight", (3,), dtype=torch.float32).dtype == torch.float32
    assert moves == [((), {"device": CPU}), ((), {"device": CPU, "dtype": torch.float32})]


@pytest.mark.parametrize("read", ["get", "stored"])
def test_a_full_device_is_no_unreadable_file(read, tmp_path, monkeypatch):
    """Weights that a GPU has no room for were called unreadable, with the exit code of a wrong command."""
    save_file(FIRST, tmp_path / "model.safetensors")
    weights = source(tmp_path)

    def full(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(torch.Tensor, "to", full)
    with pytest.raises(torch.OutOfMemoryError):
        getattr(weights, read)("model.norm.weight", (3,))


def test_a_bare_transformer_has_no_first_part(tmp_path):
    """GPT2Model's own checkpoints say wte.weight; a full name still comes first."""
    bare = {"wte.weight": torch.randn(5, 3), "transformer.wpe.weight": torch.randn(7, 3)}
    bare["wpe.weight"] = torch.ones(7, 3)
    save_file(bare, tmp_path / "model.safetensors")
    weights = source(tmp_path)
    assert torch.equal(weights.get("transformer.wte.weight", (5, 3)), bare["wte.weight"])
    assert torch.equal(weights.get("transformer.wpe.weight", (7, 3)), bare["transformer.wpe.weight"])


def test_missing_tensor(tmp_path):
    """The message names the tensor."""
    save_file(FIRST, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"weights have no tensor 'lm_head\.weight'"):
        source(tmp_path).get("lm_head.weight", (5, 3))


def test_missing_shard(tmp_path):
    """Reported at once, not when its first tensor is read."""
    write_shards(tmp_path)
    write_index(tmp_path)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="1 weight files are missing, the first is model-00002-of-00002"):
        source(tmp_path)


@pytest.mark.parametrize("missing", [1, 2])
def test_missing_shard_without_an_index(tmp_path, missing):
    """The names say how many there are: a download that stopped before the index came."""
    write_shards(tmp_path)
    (tmp_path / f"model-0000{missing}-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="1 of 2 weight files are missing"):
        source(tmp_path)


def test_more_positions_than_the_run_has(tmp_path):
    """A lower --max-model-len takes the first rows of a table of learned positions, and of no other tensor."""
    table = torch.randn(7, 3)
    tables = {"transformer.wpe.weight": table, "transformer.wte.weight": table.clone()}
    save_file(tables, tmp_path / "model.safetensors")
    weights = source(tmp_path)
    assert torch.equal(weights.get("transformer.wpe.weight", (5, 3)), table[:5])
    for name, shape in (("wpe", (8, 3)), ("wpe", (5, 2)), ("wpe", (5,)), ("wte", (5, 3))):
        with pytest.raises(UserError, match="has shape"):
            weights.get(f"transformer.{name}.weight", shape)


def test_wrong_shape(tmp_path):
    """The message has both shapes."""
    save_file(FIRST, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"'model\.norm\.weight' has shape \(3,\), config says \(4,\)"):
        source(tmp_path).get("model.norm.weight", (4,))


@pytest.mark.parametrize("content", [b"", b"not weights", b"\x08\x00\x00\x00\x00\x00\x00\x00{}      "])
def test_broken_file(tmp_path, content):
    """A UserError, not an exception of safetensors."""
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError):
        source(tmp_path).get("model.norm.weight", (3,))


def test_truncated_file(tmp_path):
    """A download that stopped must not give zeros or garbage."""
    path = tmp_path / "model.safetensors"
    save_file(FIRST, path)
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(UserError, match="unreadable weights"):
        source(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "no JSON: Expecting property name"),
        ("{}", "unreadable index"),
        ("[]", "not a JSON object"),
        ('{"weight_map": 3}', "unreadable index"),
        ("null", "not a JSON object"),
    ],
)
def test_broken_index(tmp_path, content, message):
    """A UserError that names the index, whatever is in it."""
    write_shards(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(content)
    with pytest.raises(UserError, match=rf"index\.json: {message}"):
        source(tmp_path)


def test_no_weights(tmp_path):
    """The message says which kind of file is missing."""
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match=r": pytorch_model\.bin is not read, .*save_pretrained"):
        source(tmp_path)


def test_random_weights_are_the_same_each_time_whatever_came_before():
    """Neither the order of calls nor the global generator may change them."""
    first, second = RandomWeights(torch.float32, CPU), RandomWeights(torch.float32, CPU)
    expected = first.get("model.layers.0.mlp.up_proj.weight", (7, 5))
    torch.manual_seed(5)
    second.get("lm_head.weight", (3, 3))
    assert torch.equal(second.get("model.layers.0.mlp.up_proj.weight", (7, 5)), expected)


def test_random_weights_differ_by_name_and_seed():
    """Two tensors with the same numbers would hide a mix-up."""
    weights = RandomWeights(torch.float32, CPU)
    tensor = weights.get("a.weight", (4, 4))
    assert not torch.equal(weights.get("b.weight", (4, 4)), tensor)
    assert not torch.equal(RandomWeights(torch.float32, CPU, seed=1).get("a.weight", (4, 4)), tensor)


def test_random_weights_are_those_of_fp32_rounded():
    """Runs in two dtypes must be the same model."""
    wide = RandomWeights(torch.float32, CPU).get("a.weight", (63, 64))
    assert torch.equal(RandomWeights(torch.bfloat16, CPU).get("a.weight", (63, 64)), wide.to(torch.bfloat16))


def test_random_weights_have_a_models_scale():
    """30 layers of larger numbers would overflow fp16."""
    weights = RandomWeights(torch.float32, CPU)
    for name, shape in (("a.weight", (200, 200)), ("a.bias", (40000,))):
        tensor = weights.get(name, shape)
        assert tensor.shape == shape
        assert abs(tensor.mean()) < 0.001
        assert abs(tensor.std() - 0.02) < 0.001


def test_random_weights_that_are_filled():
    """Norms and the like are filled, in the run's dtype or one of their own."""
    weights = RandomWeights(torch.bfloat16, CPU)
    assert torch.equal(weights.get("model.norm.weight", (9,), fill=1.5), torch.full((9,), 1.5, dtype=torch.bfloat16))
    assert torch.equal(weights.get("sigma", (3,), dtype=torch.float32, fill=1.4), torch.full((3,), 1.4))
    assert weights.get("sigma", (3,), dtype=torch.float32).dtype == torch.float32


def test_stored_shapes(tmp_path):
    """A model that leaves a shape to the checkpoint asks for it, by bare names too; random weights have none."""
    save_file({"model.a": torch.ones(2, 3), "b": torch.tensor(1.0)}, tmp_path / "model.safetensors")
    weights = source(tmp_path)
    assert [weights.shape(name) for name in ("model.a", "model.b", "model.c")] == [(2, 3), (), None]
    assert torch.equal(weights.get("model.b", ()), torch.tensor(1.0))
    assert RandomWeights(torch.float32, CPU).shape("model.a") is None


def test_a_dtype_of_its_own(tmp_path):
    """fp32 values must not be rounded to the run's dtype first; checkpoints ignore ``fill``."""
    save_file(FIRST, tmp_path / "model.safetensors")
    tensor = source(tmp_path, torch.bfloat16).get("model.norm.weight", (3,), dtype=torch.float32, fill=9.0)
    assert torch.equal(tensor, FIRST["model.norm.weight"])


@pytest.mark.parametrize("indices", [range(1, 4), range(2, 2), np.array([0, 1, 4]), np.array([3])])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_part_of_a_tensor(tmp_path, dim, indices):
    """One of several processes reads its own rows; random ones are those of the whole tensor."""
    save_file({"m": torch.randn(5, 6, 2)}, tmp_path / "model.safetensors")
    for weights in (source(tmp_path), RandomWeights(torch.float32, CPU)):
        whole = weights.get("m", (5, 6, 2))
        part = weights.get("m", (5, 6, 2), take=Take(dim, indices))
        assert torch.equal(part, whole.index_select(dim, torch.tensor(indices, dtype=torch.long)))
    assert Take.of(dim, range(5), 5) is None


@pytest.mark.parametrize("scale", ["weight_scale", "weight_scale_inv", "input_scale"])
def test_scaled_8_bit_floats_are_refused(tmp_path, scale):
    """Read as plain numbers, they would be another model; config.json may not say that they are quantized."""
    tensors = {"x.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), f"x.{scale}": torch.ones(1)}
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"'x\.weight' holds 'F8_E4M3', and config\.json has no quantization_config"):
        source(tmp_path).get("x.weight", (2, 2))


def test_mistrals_own_form_alone_is_named(tmp_path):
    """The line was that there is no output projection: its tensors have other names."""
    save_file({"output.weight": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    with pytest.raises(UserError, match=r"consolidated\.safetensors has Mistral's own names of tensors"):
        source(tmp_path)
