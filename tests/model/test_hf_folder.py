"""Configs for other engines: the written shape is the shape that is read back."""

import json

import msgspec
import pytest

from rosebatch.bench.scenario import configs_dir
from rosebatch.config.model import ModelConfig, RopeConfig
from rosebatch.config.toml_file import load_toml
from rosebatch.core.errors import UserError
from rosebatch.model.hf.config import read_model_config
from rosebatch.model.hf.folder import write_config
from rosebatch.model.registry import FAMILIES
from tests.engine.family_models import FAMILIES as SMALL

# Those that other engines have.
MODELS = [
    path
    for path in sorted((configs_dir() / "models").glob("*.toml"))
    if FAMILIES[load_toml(path, ModelConfig).family].hf_values is not None
]
QWEN = load_toml(configs_dir() / "models" / "qwen3-0.6b.toml", ModelConfig)


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_round_trip(tmp_path, path):
    """A peer with another shape would be compared without anybody noticing."""
    config = load_toml(path, ModelConfig)
    write_config(config, tmp_path)
    # The reader writes the default scale out for every layer.
    scales = tuple(config.attention_scale(layer) for layer in range(config.num_layers))
    read = read_model_config(tmp_path)
    assert tuple(read.attention_scale(layer) for layer in range(config.num_layers)) == scales
    assert msgspec.structs.replace(read, attention_scales=()) == msgspec.structs.replace(config, attention_scales=())


@pytest.mark.parametrize("name", ["bamba", "granite4_h", "nemotron_h", "falcon_h1"])
def test_round_trip_of_mamba2(tmp_path, name):
    """Groups, factors and kinds of layers that no shape of those above has."""
    config = SMALL[name]
    write_config(config, tmp_path)
    assert read_model_config(tmp_path) == config


@pytest.mark.parametrize("eos", [(), (3,), (3, 4)])
def test_end_tokens(tmp_path, eos):
    """No end token, one, or several."""
    write_config(msgspec.structs.replace(QWEN, eos_token_ids=eos), tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["eos_token_id"] == {0: None, 1: 3, 2: [3, 4]}[len(eos)]


def test_linear_scaling(tmp_path):
    """The other kind of RoPE scaling must survive too."""
    config = msgspec.structs.replace(QWEN, rope=RopeConfig(theta=5.0, scaling="linear", factor=2.0))
    write_config(config, tmp_path)
    assert read_model_config(tmp_path) == config


@pytest.mark.parametrize(
    "change",
    [
        {"qkv_bias": True},
        {"out_bias": True},
        {"mlp_bias": True},
        {"sliding_windows": (4,) * 28},
        {"residual_multiplier": 0.5},
        {"rotary_layers": (True, False) * 14},
    ],
    ids=lambda change: next(iter(change)),
)
def test_shapes_without_an_architecture(tmp_path, change):
    """Refused: leaving out a bias or a window would compare another model."""
    with pytest.raises(UserError, match="give the model's transformers folder with --model"):
        write_config(msgspec.structs.replace(QWEN, **change), tmp_path)


def test_hp1_is_refused(tmp_path):
    """No other engine has such a model."""
    with pytest.raises(UserError, match="other engines cannot run models of the family hp1"):
        write_config(load_toml(configs_dir() / "models" / "tiny-hp1.toml", ModelConfig), tmp_path)
