"""Frozen configs and their TOML files; every file that ships is read."""

from dataclasses import fields
from pathlib import Path

import msgspec
import pytest

from rosebatch.config.byte_sizes import parse_size
from rosebatch.config.gated_delta import DeltaConfig
from rosebatch.config.hp1 import HP1Config
from rosebatch.config.mamba2 import MambaConfig
from rosebatch.config.model import ExpertsConfig, ModelConfig, RopeConfig
from rosebatch.config.run import RunConfig
from rosebatch.config.toml_file import convert, load_toml
from rosebatch.core.errors import FlagError, UserError
from rosebatch.model.registry import check_config
from rosebatch.ops.ops import ACTIVATIONS, GATES

MODELS = sorted((Path(__file__).resolve().parents[2] / "configs" / "models").glob("*.toml"))
SIZES = {"vocab_size": 100, "hidden_size": 16, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 4}
SIZES |= {"intermediate_size": 32, "max_model_len": 64}
SHAPE = {**SIZES, "family": "llama", "norm_eps": 1e-5, "activation": "silu"}
HP1_SHAPE = {**SIZES, "family": "hp1", "activation": "relu", "rope": RopeConfig(), "hp1": HP1Config()}
DELTA = DeltaConfig(layers=(True, False), key_heads=2, value_heads=4, key_dim=8, value_dim=8)
EXPERTS = ExpertsConfig(layers=(True, True), num_experts=4, experts_per_token=2, expert_size=8)
MAMBA = MambaConfig(layers=(True, False), heads=4, head_dim=4, groups=2, state_size=8)
GRANITE = {**SHAPE, "family": "granite4", "mamba": MAMBA}
NEMOTRON = {**SHAPE, "family": "nemotron_h", "rope": None, "activation": "relu2", "mamba": MAMBA}
NEMOTRON |= {"attention_layers": (False, True), "mlp_layers": (False, False)}
DELTA_SHAPE = {**SHAPE, "family": "qwen3_5", "delta": DELTA}


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_models_that_ship(path):
    """Each is a model that could be built: positions fit the family, end tokens are in the vocabulary."""
    config = check_config(load_toml(path, ModelConfig), str(path))
    assert (config.rope is None) == (config.family in ("gpt2", "bert", "nemotron_h"))
    assert config.activation in {"gpt2": ACTIVATIONS, "hp1": ("relu",), "nemotron_h": ("relu2",)}.get(
        config.family, GATES
    )
    assert all(0 <= token < config.vocab_size for token in config.eos_token_ids)
    assert {len(config.sliding_windows), len(config.attention_scales)} <= {0, config.num_layers}
    assert config.head_dim % 2 == 0
    if config.family == "gpt2":
        assert (config.num_heads * config.head_dim, config.num_kv_heads) == (config.hidden_size, config.num_heads)
        assert config.qkv_bias and config.out_bias and config.mlp_bias


def test_models_ship():
    assert MODELS


def test_defaults_by_layer():
    config = ModelConfig(**SHAPE)
    assert (config.sliding_window(1), config.attention_scale(1)) == (0, 0.5)
    config = ModelConfig(**SHAPE, sliding_windows=(0, 7), attention_scales=(1.0, 0.25))
    assert [config.sliding_window(i) for i in range(2)] == [0, 7]
    assert [config.attention_scale(i) for i in range(2)] == [1.0, 0.25]


def test_hp1_is_a_model_of_qwen3s_size():
    """The blocks hold as many parameters as those of Qwen3-0.6B: what the article says of its model."""
    hp1, qwen = (load_toml(path, ModelConfig) for path in MODELS if path.stem in ("hp1-0.6b", "qwen3-0.6b"))

    def parameters(c):
        attention = 2 * (c.num_heads + c.num_kv_heads) * c.head_dim
        return c.num_layers * c.hidden_size * (attention + 3 * c.intermediate_size)

    assert parameters(hp1) == parameters(qwen) == 440_401_920
    assert (hp1.vocab_size, hp1.rope, hp1.hidden_size) == (qwen.vocab_size, qwen.rope, qwen.hidden_size)


def test_hp1():
    assert HP1Config() == HP1Config(fir_k=3, relu_pre=True, clip_min=0.0, clip_max=1.0)
    assert HP1Config(clip_min=1.0, clip_max=1.0).clip_min == 1.0
    assert ModelConfig(**HP1_SHAPE).hp1 == HP1Config()


@pytest.mark.parametrize(
    ("shape", "changes", "message"),
    [
        (HP1_SHAPE, {"hp1": None, "norm_eps": 1e-5}, "hp1 is missing: the gate of attention"),
        (SHAPE, {"hp1": HP1Config()}, "hp1 has no meaning for llama"),
        (HP1_SHAPE, {"norm_eps": 1e-5}, "norm_eps has no meaning for hp1"),
        (SHAPE, {"norm_eps": 0.0}, r"norm_eps must be > 0, got 0\.0"),
        (HP1_SHAPE, {"sliding_windows": (0, 7)}, "sliding_windows is not supported for hp1"),
        (HP1_SHAPE, {"qk_norm": True}, "qk_norm is not supported for hp1"),
        (HP1_SHAPE, {"activation": "silu"}, "activation 'silu' is not supported for hp1"),
        (HP1_SHAPE, {"out_bias": True}, "out_bias is not supported for hp1"),
        (SHAPE, {"delta": DELTA}, "delta has no meaning for llama"),
        (SHAPE, {"family": "qwen3_5"}, "delta is missing"),
        (DELTA_SHAPE, {"num_layers": 3}, "delta.layers has 2 values for 3 layers"),
        (DELTA_SHAPE, {"sliding_windows": (0, 7)}, "sliding_windows is not supported for qwen3_5"),
        (DELTA_SHAPE, {"attention_soft_cap": 2.0}, "attention_soft_cap is not supported for qwen3_5"),
        (SHAPE, {"attention_layers": [True]}, "attention_layers has 1 values for 2 layers"),
        (SHAPE, {"attention_layers": [True] * 2}, "attention_layers has no meaning for llama"),
        (SHAPE, {"mamba": MAMBA}, "mamba has no meaning for llama"),
        (GRANITE, {"attention_scales": (0.1, 0.2)}, "with Mamba2, attention is alike in all layers that have it"),
        ({**GRANITE, "family": "falcon_h1"}, {"attention_layers": (False, True)}, "has both attention and Mamba2"),
        (NEMOTRON, {"mlp_layers": (False, True)}, "Mamba2, attention or an MLP: one of the three"),
        ({**SHAPE, "family": "gemma"}, {"experts": EXPERTS}, "experts has no meaning for gemma"),
        (SHAPE, {"family": "gpt_oss"}, "experts is missing"),
        (SHAPE, {"family": "lama"}, "shape.toml: unknown family 'lama'; families are bamba, bert, cohere, "),
    ],
)
def test_what_a_family_cannot_have(shape, changes, message):
    """Rather than left out of account: another model would answer."""
    with pytest.raises((UserError, ValueError), match=message):
        check_config(ModelConfig(**{**shape, **changes}), "shape.toml")


def test_groups_of_heads_are_whole():
    """A kernel would read B and C of a group that is not there."""
    with pytest.raises(ValueError, match="heads 4 is no multiple of groups 3"):
        MambaConfig(layers=(True, False), heads=4, head_dim=4, groups=3, state_size=8)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ({"clip_min": 0.5, "clip_max": 0.4}, r"clip_min 0\.5 is above clip_max 0\.4"),
        ({"clip_max": float("inf")}, "must be finite, got 0.0 and inf"),
        ({"clip_min": float("nan")}, "must be finite"),
    ],
)
def test_impossible_bounds(bounds, message):
    with pytest.raises(ValueError, match=message):
        HP1Config(**bounds)


@pytest.mark.parametrize("taps", [0, 9, 2**80])
def test_filters_that_are_too_long_or_empty(taps):
    """Kernels keep a sum for each key of the filter in registers: compiling one for 2^80 keys never ends."""
    with pytest.raises(ValueError, match=r"fir_k must be in \[1, 8\], got"):
        HP1Config(fir_k=taps)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": (True, True)}, "layers all have the delta rule is not supported"),
        ({"value_heads": 3}, "value_heads 3 is no multiple of key_heads 2"),
        ({"taps": 2**80}, r"taps must be in \[1, 16\]"),
        ({"key_dim": 0}, "key_dim must be in"),
    ],
)
def test_impossible_delta_rules(changes, message):
    """Kernels are compiled for these numbers, and a cache needs a layer that has one."""
    with pytest.raises(ValueError, match=message):
        msgspec.structs.replace(DELTA, **changes)


def test_heads_must_share_kv_heads_evenly():
    with pytest.raises(ValueError, match="num_heads 4 is no multiple of num_kv_heads 3"):
        ModelConfig(**{**SHAPE, "num_kv_heads": 3})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs must be >= 1, got 0"),
        ({"max_model_len": 1}, "max_model_len must be >= 2, got 1"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens must be >= 1, got 0"),
        ({"block_size": -1}, "block_size must be >= 1, got -1"),
        ({"kv_cache_memory": -1}, "kv_cache_memory must be >= 0, got -1"),
        ({"kv_cache_memory": "lots"}, "kv_cache_memory must be like 512MiB or 4GiB, got 'lots'"),
        ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization must be in \(0, 1\], got 0"),
        ({"gpu_memory_utilization": 1.01}, r"gpu_memory_utilization must be in \(0, 1\], got 1.01"),
        ({"gpu_memory_utilization": float("nan")}, "gpu_memory_utilization must be in"),
    ],
)
def test_impossible_limits(values, message):
    """Otherwise a run fails much later, or without a message that names the setting."""
    with pytest.raises(ValueError, match=message):
        RunConfig(**values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"dtype": "int8"}, "dtype must be one of auto, float32, float16, bfloat16, got 'int8'"),
        ({"dtype": 16}, "dtype must be one of auto, float32, float16, bfloat16, got 16"),
        ({"device": "tpu"}, "device must be one of auto, cpu, cuda, got 'tpu'"),
        ({"load_format": "pt"}, "load_format must be one of auto, dummy, got 'pt'"),
        ({"generation_config": True}, "generation_config must be one of none, auto, got True"),
        ({"sampler": "vllm"}, "sampler must be one of rosebatch, flashinfer, got 'vllm'"),
        ({"max_num_seqs": "many"}, "max_num_seqs: Invalid enum value"),
        ({"max_num_seqs": True}, "max_num_seqs: Expected `int | str`, got `bool`"),
        ({"max_model_len": 16.5}, "max_model_len: Expected `int | null`, got `float`"),
        ({"kv_cache_memory": 1.5}, "kv_cache_memory: Expected `int | str | null`, got `float`"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization: Expected `float`, got `str`"),
        ({"tokenizer": 3}, "tokenizer: Expected `str | null`, got `int`"),
        ({"prefix_cache": "yes"}, "prefix_cache must be True or False, got 'yes'"),
        ({"prefix_cache": 1}, "prefix_cache must be True or False, got 1"),
    ],
)
def test_settings_of_the_wrong_kind(values, message):
    """From Python nothing has checked them before, and a TypeError would not say which one it was."""
    with pytest.raises(ValueError) as caught:
        RunConfig.of("model", **values)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_num_sequences", "unknown setting max_num_sequences; did you mean max_num_seqs?"),
        ("prefix_caching", "unknown setting prefix_caching; did you mean prefix_cache?"),
        ("toggle", "unknown setting toggle"),
        ("model_path", "unknown setting model_path"),
    ],
)
def test_an_unknown_setting(name, message):
    """A misspelt setting that is ignored would change nothing, and nobody would notice."""
    with pytest.raises(ValueError) as caught:
        RunConfig.of("model", **{name: True})
    assert str(caught.value).startswith(message)
    with pytest.raises(ValueError, match=r"^unknown setting switches"):
        RunConfig.of("model", switches={"prefix_cache": False})


def test_settings_and_switches_by_name():
    """One flat list of keywords fills both; paths may be given as such."""
    config = RunConfig.of("model", max_num_seqs=3, prefix_cache=False, cuda_graph=None, tokenizer=Path("a") / "b")
    switches = {"prefix_cache": False, "cuda_graph": None}
    assert config == RunConfig(model="model", max_num_seqs=3, tokenizer="a/b", switches=switches)
    assert RunConfig.of(None) == RunConfig()


def test_none_is_the_default():
    """``LLM(kv_cache_dtype=None)`` was refused, as vLLM's users may write it, and so were most other settings."""
    names = {f.name for f in fields(RunConfig)} - {"model", "switches"}
    assert RunConfig.of("model", **dict.fromkeys(names)) == RunConfig(model="model")


def test_the_size_of_the_kv_cache():
    """In bytes, however it is given."""
    assert [RunConfig(kv_cache_memory=size).kv_cache_bytes for size in (None, 2**20, "1MiB")] == [None, 2**20, 2**20]


@pytest.mark.parametrize(
    ("config", "name"),
    [(RunConfig(), "model"), (ModelConfig(**SHAPE), "vocab_size"), (RopeConfig(), "theta"), (HP1Config(), "clip_max")],
)
def test_frozen(config, name):
    with pytest.raises(AttributeError):
        setattr(config, name, 1)


@pytest.mark.parametrize(
    "config", [HP1Config(clip_max=0.5), ModelConfig(**SHAPE, rope=RopeConfig(factor=2.0)), ModelConfig(**HP1_SHAPE)]
)
def test_configs_survive_being_written_out(config):
    """The report writes them; what it wrote must be readable."""
    assert convert(msgspec.to_builtins(config), type(config), "report") == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"clip_mx": 0.5}, "clip_mx"),
        ({"clip_max": "0.5"}, "clip_max"),
        ({"relu_pre": 1.5}, "relu_pre"),
        ({"clip_max": -1}, "clip_min 0.0 is above clip_max -1"),
        ([], "Expected"),
    ],
)
def test_convert_says_where_and_what(values, message):
    with pytest.raises(UserError, match=r"^gate\.toml: ") as caught:
        convert(values, HP1Config, "gate.toml")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"clip_max = ", "Invalid value"),
        (b"clip_max = -1.0", "clip_min 0.0 is above clip_max -1.0"),
        (b"[gate]\nclip_max = 0.5", "gate"),
        (b"\xff", "utf-8"),
        (None, "No such file"),
    ],
)
def test_broken_toml(tmp_path, content, message):
    path = tmp_path / "gate.toml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load_toml(path, HP1Config)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_toml(tmp_path):
    path = tmp_path / "gate.toml"
    path.write_text("relu_pre = false\nclip_max = 0.5\n")
    assert load_toml(path, HP1Config) == HP1Config(relu_pre=False, clip_max=0.5)


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
    with pytest.raises(FlagError, match="a size must be like 512MiB or 4GiB"):
        parse_size(text)
