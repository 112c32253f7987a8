"""What --model may name: folders, files, hub ids; the name it gets, and its length."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from rosebatch.config.run import RunConfig
from rosebatch.config.switches import Switches
from rosebatch.core.errors import FlagError, UserError
from rosebatch.engine.load import load_engine
from rosebatch.model.registry import build_model
from rosebatch.model.source import find_model
from rosebatch.ops.select import select
from rosebatch_kernels.common.device import Device
from tests.model.gguf_files import SHAPE, random_model

CPU = torch.device("cpu")
TOML = Path(__file__).resolve().parents[2] / "configs" / "models" / "tiny-llama.toml"
LENGTH = SHAPE["max_position_embeddings"]

pytestmark = pytest.mark.usefixtures("cache", "hub")


def find(model, load_format="auto", **options):
    return find_model(RunConfig(model=str(model), load_format=load_format, dtype="float32", **options), CPU)


def saved(folder, name):
    random_model(name).save_pretrained(folder / f"small-{name}")
    return folder / f"small-{name}"


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A model folder."""
    return saved(tmp_path_factory.mktemp("models"), "llama")


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    """A model folder with learned positions."""
    return saved(tmp_path_factory.mktemp("models"), "gpt2")


@pytest.fixture
def cached(llama, add):
    """The model folder's content in the Hugging Face cache, beside a tokenizer: the snapshot."""
    snapshot = add({"tokenizer.json": "{}"}, name="org/llama")
    shutil.copytree(llama, snapshot, dirs_exist_ok=True)
    return snapshot


# What is found, and its name


def test_a_hub_id(cached, llama):
    """From the cache, under its id, with the weights of its snapshot."""
    source = find("org/llama")
    assert (source.name, source.folder) == ("org/llama", cached)
    name, shape = "model.norm.weight", (SHAPE["hidden_size"],)
    assert torch.equal(source.weights(CPU).get(name, shape), find(llama).weights(CPU).get(name, shape))


@pytest.mark.parametrize("model", ["org/llama", "org/llama@v1"])
def test_a_revision(cached, add, llama, model):
    """By the flag or behind the id; it is no part of the name, by which reports are compared."""
    other = add({"tokenizer.json": "{}"}, name="org/llama", commit="d" * 40, ref="v1")
    shutil.copytree(llama, other, dirs_exist_ok=True)
    source = find(model, revision="v1")
    assert (source.name, source.folder) == ("org/llama", other)


def test_two_revisions(cached):
    """Neither is silently ignored."""
    with pytest.raises(FlagError, match="--revision v2 contradicts --model org/llama@v1"):
        find("org/llama@v1", revision="v2")


def test_a_revision_of_a_path(llama):
    """A folder has one state only."""
    for model, load_format in (llama, "auto"), (TOML, "dummy"):
        with pytest.raises(FlagError, match="--revision v1 needs a Hugging Face id"):
            find(model, load_format, revision="v1")


def test_random_weights_of_a_hub_id(add, llama):
    """The config is enough."""
    add({"config.json": (llama / "config.json").read_text(), "tokenizer.json": "{}"}, name="org/empty")
    source = find("org/empty", "dummy")
    assert (source.name, source.config.vocab_size) == ("org/empty", SHAPE["vocab_size"])


def test_names(llama, cached, write_gguf, monkeypatch):
    """Folders and files by their own name, snapshots by their id."""
    gguf = write_gguf("llama", random_model("llama"), file="small.Q8_0.gguf")
    names = [find(model).name for model in (llama, f"{llama}/", cached, gguf)]
    assert names == ["small-llama", "small-llama", "org/llama", "small.Q8_0"]
    assert find(TOML, "dummy").name == "tiny-llama"
    monkeypatch.chdir(llama)
    assert find(".").name == "small-llama"


def test_a_name_of_ones_own(llama, cached):
    """What results and reports say, whatever the model is called."""
    for model, load_format in (llama, "auto"), ("org/llama", "auto"), (TOML, "dummy"):
        assert find(model, load_format, served_model_name="mine").name == "mine"


def test_the_home_folder(llama, monkeypatch):
    """A shell does not expand it behind --model=."""
    monkeypatch.setenv("HOME", str(llama.parent))
    assert find("~/small-llama").folder == llama
    with pytest.raises(UserError, match=f"{llama.parent}/none: no such model"):
        find("~/none")


def test_a_folder_wins_over_an_id(cached, llama, tmp_path, monkeypatch):
    """A user's own model in ./org/llama."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(llama, "org/llama")
    source = find("org/llama")
    assert (source.name, source.folder) == ("llama", Path("org/llama"))


# What is not found


@pytest.mark.parametrize("model", ["/none/of/these", "./none", "none.gguf", "models/none.toml", "gpt2"])
def test_a_path_that_does_not_exist(model):
    """All that may be given, without a word of networks."""
    with pytest.raises(UserError, match="no such model; give a model folder") as caught:
        find(model)
    assert all(part in str(caught.value) for part in (".gguf", ".toml", "ORG/NAME"))
    assert "hf download" not in str(caught.value)


def test_an_id_that_is_not_cached(monkeypatch):
    """Said of both: it might have been meant as a folder."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"there is no such folder, .* hf download org/none"):
        find("org/none")


def test_a_file_that_is_no_model(tmp_path):
    """A single shard, say."""
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(UserError, match=r"model\.safetensors: not a model; give a model folder"):
        find(tmp_path / "model.safetensors")


# Its length


def test_a_lower_length(llama):
    """Nothing else changes."""
    config = find(llama).config
    assert (config.max_model_len, find(llama, max_model_len=64).config.max_model_len) == (LENGTH, 64)
    assert find(llama, max_model_len=LENGTH).config == config
    assert find(TOML, "dummy", max_model_len=64).config.max_model_len == 64


def test_an_impossible_length(llama):
    """Above it the positions are not trained, or are not there."""
    with pytest.raises(FlagError, match=f"--max-model-len {LENGTH + 1} must be between 2 and {LENGTH}"):
        find(llama, max_model_len=LENGTH + 1)


def test_a_lower_length_of_learned_positions(gpt2):
    """The table of the checkpoint is longer than the run: its first rows are used."""
    ops = select(Switches.resolve({}, "cpu"), "cpu", "rosebatch")
    whole, lowered = (
        build_model(source.config, ops, source.weights(CPU)) for source in (find(gpt2), find(gpt2, max_model_len=32))
    )
    assert whole.positions.shape[0] == LENGTH
    assert torch.equal(lowered.positions, whole.positions[:32])


# Whether it is still the model that was found


@pytest.mark.parametrize(("name", "end"), [("model.safetensors", b"\x01"), ("config.json", b"} ")])
def test_files_that_change_before_they_are_loaded(llama, tmp_path, name, end):
    """Other weights than the manifest's were loaded, or those of one model with another's shape."""
    folder = shutil.copytree(llama, tmp_path / "model")
    source = find(folder)
    state = source.state
    source.require_unchanged()
    (folder / name).write_bytes((folder / name).read_bytes().rstrip()[:-1] + end)
    assert find(folder).state != state == source.state
    with pytest.raises(UserError, match=r"^model: the model's files changed while they were loaded$"):
        load_engine(source, RunConfig(), Switches.resolve({}, "cpu"), CPU)


def test_a_copy_has_another_state(llama, tmp_path):
    """States are of files: only hashes of their contents tell whether a copy on another machine is the same."""
    copy = find(shutil.copytree(llama, tmp_path / llama.name))
    assert copy.state != find(llama).state
    assert copy.fingerprint() == find(llama).fingerprint()


def test_a_shape_is_in_the_fingerprint_without_its_defaults(llama):
    """With each new field of the shape, --resume refused all jobs that had begun before."""
    config = find(llama).config
    assert "num_layers=" in repr(config)
    assert "experts=None" not in repr(config) and "kv_cache_dtype" not in repr(config)


# How K and V are stored

SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True, "dynamic": False}
KV_ONLY = {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": SCHEME}
MODELOPT = {"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}


@pytest.fixture
def stored(llama, tmp_path, monkeypatch):
    """How K and V are stored on a GPU of an architecture, or on a CPU, by the ``quantization_config``."""

    def find(config, arch=90, model=(), **options):
        folder = tmp_path / "model"
        shutil.copytree(llama, folder, dirs_exist_ok=True)
        values = json.loads((llama / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**values, "quantization_config": config, **dict(model)}))
        monkeypatch.setattr("rosebatch.ops.device.device_of", lambda device: Device.of_arch(arch or 80, 100))
        device = torch.device("cuda") if arch else CPU
        return find_model(RunConfig(model=str(folder), dtype="bfloat16", **options), device).config.kv_cache_dtype

    return find


@pytest.mark.parametrize("config", [KV_ONLY, MODELOPT, {**MODELOPT, "kv_cache_scheme": SCHEME}])
def test_a_checkpoint_that_names_an_fp8_cache_gets_it(stored, config):
    """As in vLLM and SGLang, whose users wondered why only half the tokens fit."""
    assert stored(config) == stored(config, 89) == "fp8"
    assert stored(config, 86) == stored(config, 0) == "auto", "where kernels lack the type, and where all is decoded"
    assert stored(config, kv_cache_dtype="none") == stored(config, quantization="none") == "auto"
    assert stored(config, 0, kv_cache_dtype="fp8") == "fp8"


def test_a_model_whose_cache_stays_as_it_is(stored):
    """Asked for, it is refused; a checkpoint's wish is not."""
    windows = {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 24}
    assert stored(KV_ONLY, model=windows) == "auto"
    with pytest.raises(FlagError, match="no layer has K and V of softmax attention over more than 512 keys"):
        stored(KV_ONLY, model=windows, kv_cache_dtype="fp8")


@pytest.mark.parametrize("scheme", [None, {**SCHEME, "type": "int"}, {**SCHEME, "num_bits": 4}])
def test_other_caches_are_in_the_dtype_of_the_run(stored, scheme):
    """fp8 would not be what the checkpoint names."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    assert stored({**KV_ONLY, "config_groups": {"a": group}, "kv_cache_scheme": scheme}) == "auto"
    assert stored({**MODELOPT, "quant_algo": "FP8", "kv_cache_quant_algo": None}) == "auto"
