"""Keys and tensors of GGUF files: each is used, means nothing, or is refused by its name before any conversion."""

import json
import math
import re

import pytest
import torch
from gguf.constants import Keys

from rosebatch.core.errors import UserError
from rosebatch.model.gguf import convert as module
from rosebatch.model.gguf.convert import convert
from rosebatch.model.gguf.metadata import Reader
from rosebatch.model.hf.generation_config import unserved_defaults
from tests.model.gguf_files import changed


def keys_of(group):
    """The keys that the package lists in a class, and in classes of it."""
    for name, value in vars(group).items():
        if isinstance(value, type):
            yield from keys_of(value)
        elif isinstance(value, str) and not name.startswith("__"):
            yield value


PLACES = {"{arch}": "llama", "{name}": "other", "{id}": "0", "{dense}": "dense_2"}
LISTED = sorted({re.sub(r"\{\w+\}", lambda found: PLACES[found[0]], key) for key in keys_of(Keys)})
# Prefixes and keys that change nothing.
HARMLESS = ("general.", "split.", "imatrix.", "llama.vocab_size", "llama.rope.scaling.finetuned", "tokenizer.ggml.pre")
HARMLESS += ("llama.tensor_data_layout", "tokenizer.chat_templates", "tokenizer.ggml.scores")
HARMLESS += tuple(f"tokenizer.ggml.{name}_token_id" for name in ("mask", "seperator", "prefix", "suffix", "middle"))
HARMLESS += tuple(f"tokenizer.ggml.{name}_token_id" for name in ("fim_pre", "fim_suf", "fim_mid", "padding", "unknown"))
HARMLESS += tuple(f"tokenizer.ggml.{name}" for name in ("add_space_prefix", "remove_extra_whitespaces"))
# Read where they have an effect, see the tests of models and tokenizers.
READ = (
    "general.architecture",
    "tokenizer.chat_template",
    "tokenizer.chat_template.other",
    "general.type",
    "split.count",
    "llama.rope.freq_base",
    "llama.attention.key_length",
    "llama.expert_count",
)
READ += tuple(f"llama.rope.scaling.{name}" for name in ("factor", "attn_factor", "yarn_attn_factor", "yarn_beta_fast"))
READ += ("llama.rope.scaling.yarn_beta_slow", "llama.rope.scaling.original_context_length")
READ += tuple(
    f"tokenizer.ggml.{name}_token_id" for name in ("eos", "bos", "eot", "eom", "fim_pad", "fim_rep", "fim_sep")
)
READ += ("tokenizer.ggml.add_bos_token", "tokenizer.ggml.add_eos_token", "tokenizer.ggml.tokens")
READ += ("tokenizer.ggml.token_type", "tokenizer.ggml.merges", "tokenizer.ggml.model", "tokenizer.ggml.pre")
READ += tuple(f"llama.{name}" for name in ("block_count", "context_length", "embedding_length", "feed_forward_length"))
READ += tuple(f"llama.attention.{name}" for name in ("head_count", "head_count_kv", "layer_norm_rms_epsilon"))
NEUTRAL = {
    "expert_count": 0,
    "expert_used_count": 0,
    "attention.sliding_window": 4096,
    "attention.causal": True,
    "attention.scale": 0.25,
    "attention.value_length": 16,
    "rope.dimension_count": 16,
    "logit_scale": 1.0,
    "embedding_scale": 1.0,
    "residual_scale": 0.0,
    "rope.scaling.yarn_ext_factor": -1.0,
    "attn_logit_softcapping": 0.0,
}

YARN = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 0.5}
YARN_READ = {"rope_type": "yarn", "factor": 4.0, "attention_factor": 0.5 * (1 + 0.1 * math.log(4.0))}


@pytest.fixture
def converted(write_gguf, toy, monkeypatch, tmp_path):
    """Converts a good file, changed in memory."""
    path, folder = write_gguf("llama", toy), tmp_path / "converted"
    good = Reader(path)

    def call(*changes, **more):
        reader = changed(good, *changes, **more)
        monkeypatch.setattr(module, "Reader", lambda path: reader)
        folder.mkdir(exist_ok=True)
        convert(path, torch.float32, folder)
        return json.loads((folder / "config.json").read_text())

    return call


@pytest.mark.parametrize(("value", "of_a_kind"), [(7, READ), ([[]], ())])
def test_every_key_of_the_list(converted, monkeypatch, value, of_a_kind):
    """Sliding windows, scales, experts, softcaps and RoPE keys were dropped without a word.

    Where a value was of another type, the error did not name the key.
    """
    monkeypatch.setattr(module, "_write_weights", lambda tensors, folder: None)
    assert len(LISTED) > 180
    wrong = {}
    for key in LISTED:
        if key in of_a_kind:
            continue
        try:
            converted({key: value})
            error = None
        except UserError as refused:
            error = str(refused)
        if key.startswith(HARMLESS) if error is None else f"'{key}'" in error and "model.gguf" in error:
            continue
        wrong[key] = error
    assert not wrong


@pytest.mark.parametrize("key", NEUTRAL)
def test_values_that_mean_nothing(converted, key):
    """Converters write many keys with the value that changes nothing."""
    assert converted({f"llama.{key}": NEUTRAL[key]}) == converted()


@pytest.mark.parametrize("key", ["llama.foo", "llama.attention.foo", "llama.rope.scaling.foo.bar", "tokenizer.foo"])
def test_an_unknown_key(converted, key):
    """What llama.cpp may compute from it tomorrow is not known today."""
    with pytest.raises(UserError, match=rf"model\.gguf: GGUF metadata '{key}' is not supported"):
        converted({key: 0})


def test_keys_that_people_add(converted, capsys):
    """They do not describe a model, so the file is served; they are named."""
    converted({"foo": 1, "someone.quantized_by": "me", "general.foo.bar": 2, "quantize.imatrix.file": "x"})
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("model.gguf: metadata that nothing here reads: foo, someone.quantized_by")


@pytest.mark.parametrize(
    "name",
    [
        "foo",
        "foo.weight",
        "blk.0.foo.weight",
        "blk.0.attn_norm.bias",
        "blk.0.attn_q_norm.weight",
        "blk.0.ffn_up.bias",
        "blk.0.ffn_gate_exps.weight",
        "blk.2.attn_q.weight",
        "blk.0.attn_q.weight.scale",
        "output_norm.bias",
        "rope_factors_long.weight",
    ],
)
def test_an_unknown_tensor(converted, name):
    """Biases, norms and experts that nobody reads were dropped without a word."""
    with pytest.raises(UserError, match=rf"model\.gguf: the tensor '{name}' is not supported"):
        converted(tensors=[name])


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight", "blk.1.ffn_gate.weight"])
def test_a_missing_tensor(converted, name):
    """It was found when the converted model was loaded, under the name of a folder of the cache."""
    with pytest.raises(UserError, match=r"model\.gguf"):
        converted(without=[name])


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("llama.attention.head_count", 0, "`int` >= 1"),
        ("llama.attention.head_count", -4, "`int` >= 1"),
        ("llama.attention.head_count_kv", [1, 2], "`int`, got `array`"),
        ("llama.attention.key_length", 0, "`int` >= 1"),
        # Fewer channels than heads.
        ("llama.embedding_length", 1, "`int` >= 4"),
        ("llama.block_count", -1, "`int` >= 0"),
        ("llama.block_count", True, "`int`, got `bool`"),
        ("llama.expert_count", -8, "`int` >= 0"),
        ("llama.context_length", 128.0, "`int`, got `float`"),
        ("llama.rope.freq_base", "1e4", "`float`, got `str`"),
        ("split.count", "2", "`int`, got `str`"),
        ("tokenizer.ggml.eos_token_id", 320, "`int` <= 319"),
        ("tokenizer.ggml.eot_token_id", -1, "`int` >= 0"),
        ("tokenizer.ggml.add_bos_token", 1, "`bool`, got `int`"),
        ("tokenizer.ggml.token_type", [1, 1], "`array` of length >= 320"),
        ("tokenizer.ggml.tokens", ["a", 1], "`str`, got `int` - at `$[1]`"),
    ],
)
def test_values_out_of_range(converted, key, value, expected):
    """A division by zero was "not a readable GGUF file", and the token -1 the last one."""
    with pytest.raises(
        UserError, match=re.escape(f"model.gguf: GGUF metadata '{key}' is {value!r}: Expected {expected}")
    ):
        converted({key: value})


def test_half_of_the_biases(converted):
    """transformers has those of all four projections of attention, or none."""
    with pytest.raises(UserError, match=r"model\.gguf: the tensor blk\.0\.attn_k\.bias is missing"):
        converted(tensors=["blk.0.attn_q.bias"])


@pytest.mark.parametrize(
    ("metadata", "told"),
    [
        ({}, "the tensor blk.0.ffn_down_exps.weight is missing"),
        ({"llama.expert_shared_count": 1}, "GGUF metadata 'llama.expert_shared_count' is 1; supported is 0"),
        ({"llama.expert_gating_func": 2}, "GGUF metadata 'llama.expert_gating_func' is not supported"),
    ],
)
def test_experts_that_are_not_mixtrals(converted, monkeypatch, metadata, told):
    """A file with experts was converted whole, and then failed under the name of a folder of the cache."""
    monkeypatch.setattr(module, "_write_weights", lambda *_: pytest.fail("nothing is converted"))
    counts = {"llama.expert_count": 8, "llama.expert_used_count": 2}
    with pytest.raises(UserError, match=re.escape(f"model.gguf: {told}")):
        converted(counts | metadata, tensors=["blk.0.ffn_gate_exps.weight"])


@pytest.mark.parametrize(
    ("fields", "rope"),
    [
        ({"rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        ({"rope.scaling.factor": 2.0, "rope.scale_linear": 4.0}, {"rope_type": "linear", "factor": 2.0}),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, {"rope_type": "default"}),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, {"rope_type": "default"}),
        (
            {"rope.scaling.factor": 2.0, "rope.scaling.attn_factor": 0.5},
            {"rope_type": "longrope", "short_factor": [2.0] * 8, "long_factor": [2.0] * 8, "attention_factor": 0.5},
        ),
        (
            YARN | {"rope.scaling.yarn_beta_fast": 16.0, "rope.scaling.yarn_beta_slow": 2.0},
            YARN_READ | {"beta_fast": 16.0, "beta_slow": 2.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_rotary_positions(converted, fields, rope):
    """Old names, other factors and slopes were dropped."""
    found = converted({f"llama.{key}": value for key, value in fields.items()})["rope_parameters"]
    assert found | rope == found


@pytest.mark.parametrize(
    "fields",
    [
        {"rope.scaling.type": "dynamic", "rope.scaling.factor": 2.0},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_ext_factor": 0.5},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0, "rope.scaling.yarn_log_multiplier": 0.1},
        {"attention.sliding_window": 64},
        {"attention.scale": 0.3},
        {"attention.value_length": 8},
        {"rope.dimension_count": 8},
    ],
)
def test_values_that_are_not_served(converted, fields):
    """They were computed as if they were not there."""
    with pytest.raises(UserError, match=r"model\.gguf: GGUF metadata 'llama\."):
        converted({f"llama.{key}": value for key, value in fields.items()})


def test_recommended_sampling(converted, tmp_path):
    """The authors' settings are those of ``--generation-config auto``."""
    converted({"general.sampling.temp": 0.5, "general.sampling.top_k": 20, "general.sampling.xtc_threshold": 0.1})
    found = json.loads((tmp_path / "converted" / "generation_config.json").read_text())
    assert {name: value for name, value in found.items() if name != "eos_token_id"} == {"temperature": 0.5, "top_k": 20}


def test_recommended_sampling_that_is_not_served(converted, tmp_path):
    """llama.cpp's own was dropped without a word."""
    own = {"penalty_repeat": 1.1, "mirostat": 2, "xtc_probability": 0.5}
    for values, told in ((own, [*own]), ({"penalty_repeat": 1.0, "mirostat": 0, "xtc_probability": 0.0}, [])):
        converted({f"general.sampling.{name}": value for name, value in values.items()})
        assert unserved_defaults(tmp_path / "converted") == told


def test_the_list_is_read_from_the_package():
    """An empty list would test nothing."""
    assert {"general.architecture", "tokenizer.ggml.eot_token_id", "xielu.eps", "clip.vision.image_size"} <= {*LISTED}
