"""Frozen configs and their TOML files; every file that ships is read."""

from pathlib import Path

import msgspec
import pytest

from rosebatch.config import EngineConfig, ModelConfig, RopeConfig, convert, load_toml, parse_size
from rosebatch.errors import FlagError, UserError
from rosebatch.ops import ACTIVATIONS

MODELS = sorted((Path(__file__).resolve().parents[1] / "configs" / "models").glob("*.toml"))
SHAPE = {
    "family": "llama",
    "vocab_size": 100,
    "hidden_size": 16,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 4,
    "intermediate_size": 32,
    "max_model_len": 64,
    "norm_eps": 1e-5,
    "activation": "silu",
}


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_models_that_ship(path):
    """Each is a model that could be built: positions fit the family, end tokens are in the vocabulary."""
    config = load_toml(path, ModelConfig)
    assert (config.rope is None) == (config.family == "gpt2")
    assert config.activation == "silu" if config.family == "llama" else config.activation in ACTIVATIONS
    assert all(0 <= token < config.vocab_size for token in config.eos_token_ids)
    assert len(config.sliding_windows) in (0, config.num_layers)
    assert len(config.attention_scales) in (0, config.num_layers)
    assert config.head_dim % 2 == 0
    if config.family == "gpt2":
        assert config.num_heads * config.head_dim == config.hidden_size
        assert config.num_kv_heads == config.num_heads
        assert config.qkv_bias
        assert config.out_bias
        assert config.mlp_bias


def test_models_ship():
    assert MODELS


def test_defaults_by_layer():
    config = ModelConfig(**SHAPE)
    assert (config.sliding_window(1), config.attention_scale(1)) == (0, 0.5)
    config = ModelConfig(**SHAPE, sliding_windows=(0, 7), attention_scales=(1.0, 0.25))
    assert [config.sliding_window(i) for i in range(2)] == [0, 7]
    assert [config.attention_scale(i) for i in range(2)] == [1.0, 0.25]


def test_heads_must_share_kv_heads_evenly():
    with pytest.raises(ValueError, match="num_heads 4 is no multiple of num_kv_heads 3"):
        ModelConfig(**{**SHAPE, "num_kv_heads": 3})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be >= 1, got 0"),
        ({"max_num_batched_tokens": -1}, "max_num_batched_tokens must be >= 0, got -1"),
        ({"block_size": -1}, "block_size must be >= 0, got -1"),
        ({"kv_cache_memory": -1}, "kv_cache_memory must be >= 0, got -1"),
    ],
)
def test_impossible_limits(values, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**values)


@pytest.mark.parametrize("config", [EngineConfig(), ModelConfig(**SHAPE), RopeConfig()])
def test_frozen(config):
    with pytest.raises(AttributeError):
        setattr(config, type(config).__struct_fields__[0], 1)


@pytest.mark.parametrize("config", [EngineConfig(block_size=7), ModelConfig(**SHAPE, rope=RopeConfig(factor=2.0))])
def test_configs_survive_being_written_out(config):
    """The report writes them; what it wrote must be readable."""
    assert convert(msgspec.to_builtins(config), type(config), "report") == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"blok_size": 16}, "blok_size"),
        ({"block_size": "16"}, "block_size"),
        ({"block_size": 1.5}, "block_size"),
        ({"block_size": -1}, "block_size must be >= 0"),
        ([], "Expected"),
    ],
)
def test_convert_says_where_and_what(values, message):
    with pytest.raises(UserError, match=r"^limits\.toml: ") as caught:
        convert(values, EngineConfig, "limits.toml")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"block_size = ", "Invalid value"),
        (b"block_size = -1", "block_size must be >= 0"),
        (b"[engine]\nblock_size = 4", "engine"),
        (b"\xff", "utf-8"),
        (None, "No such file"),
    ],
)
def test_broken_toml(tmp_path, content, message):
    path = tmp_path / "engine.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_toml(path, EngineConfig)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_toml(tmp_path):
    path = tmp_path / "engine.toml"
    path.write_text("block_size = 4\nmax_num_seqs = 3\n")
    assert load_toml(path, EngineConfig) == EngineConfig(block_size=4, max_num_seqs=3)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("512", 512),
        ("512B", 512),
        ("1k", 1000),
        ("1KiB", 1024),
        (" 2 MiB ", 2 << 20),
        ("1.5GiB", 3 << 29),
        ("4gb", 4 * 10**9),
        ("4Gi", 4 << 30),
    ],
)
def test_parse_size(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "1e9", "1 TiB", "1.GiB", "four", "1 2"])
def test_what_is_no_size(text):
    with pytest.raises(FlagError, match="is no size in bytes"):
        parse_size(text)
