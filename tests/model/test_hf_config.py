"""config.json of all architectures, as transformers 4 and 5 write it, and every mistake in it."""

import json

import pytest

from rosebatch.config.hp1 import HP1Config
from rosebatch.config.model import ModelConfig, RopeConfig
from rosebatch.core.errors import UserError
from rosebatch.model.hf.config import is_native, parse_model_config, read_model_config

GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "vocab_size": 50257,
    "n_embd": 768,
    "n_layer": 2,
    "n_head": 12,
    "n_positions": 1024,
    "layer_norm_epsilon": 1e-5,
    "activation_function": "gelu_new",
    "eos_token_id": 50256,
    "dtype": "float16",
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 3,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
HP1 = {
    **{key: value for key, value in LLAMA.items() if key != "rms_norm_eps"},
    "architectures": ["HP1ForCausalLM"],
    "model_type": "hp1",
    "head_dim": 128,
    "hidden_act": "relu",
}
LLAMA3_ROPE = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 4096}


# Of LLAMA and HP1, as rosebatch calls them.
SHAPE = {"vocab_size": 49152, "hidden_size": 576, "num_layers": 3, "num_heads": 9, "num_kv_heads": 3}
SHAPE |= {"intermediate_size": 1536, "max_model_len": 8192, "tie_word_embeddings": True}
SHAPE |= {"eos_token_ids": (2,), "dtype": "bfloat16"}


def of(architecture, **changes):
    """A Llama config under another architecture's name, with changes; None removes a key."""
    values = {**LLAMA, "architectures": [architecture], "model_type": None, **changes}
    return {key: value for key, value in values.items() if value is not None}


def parse(values):
    return parse_model_config(values, "config.json")


def test_gpt2():
    """Every field of a GPT-2 config arrives."""
    assert parse(GPT2) == ModelConfig(
        family="gpt2",
        vocab_size=50257,
        hidden_size=768,
        num_layers=2,
        num_heads=12,
        num_kv_heads=12,
        head_dim=64,
        intermediate_size=3072,
        max_model_len=1024,
        norm_eps=1e-5,
        activation="gelu_new",
        tie_word_embeddings=True,
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        attention_scales=(0.125, 0.125),
        eos_token_ids=(50256,),
        dtype="float16",
    )


def test_gpt2_is_complete_without_what_has_a_default():
    """Old configs leave out what has a default: it must be transformers'."""
    config = parse({k: GPT2[k] for k in ("architectures", "vocab_size", "n_embd", "n_layer", "n_head")})
    assert (config.max_model_len, config.norm_eps, config.activation) == (1024, 1e-5, "gelu_new")
    assert (config.tie_word_embeddings, config.eos_token_ids, config.dtype) == (True, (50256,), "float32")


def test_gpt2_options():
    """Rarely used options must not be ignored."""
    options = {"n_inner": 100, "activation_function": "relu", "tie_word_embeddings": False, "n_positions": 77}
    config = parse({**GPT2, **options})
    assert (config.intermediate_size, config.activation) == (100, "relu")
    assert (config.tie_word_embeddings, config.max_model_len) == (False, 77)


@pytest.mark.parametrize(
    ("options", "scales"),
    [
        ({"scale_attn_weights": False}, (1.0, 1.0)),
        ({"scale_attn_by_inverse_layer_idx": True}, (0.125, 0.0625)),
        ({"scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True}, (1.0, 0.5)),
        # In transformers it changes the order of rounding, not the result.
        ({"reorder_and_upcast_attn": True}, (0.125, 0.125)),
    ],
)
def test_gpt2_attention_scales(options, scales):
    """Ignoring one of these options would change every score."""
    assert parse({**GPT2, **options}).attention_scales == scales


def test_llama():
    """Every field of a Llama config arrives."""
    assert parse(LLAMA) == ModelConfig(
        family="llama", head_dim=64, norm_eps=1e-5, activation="silu", rope=RopeConfig(theta=10000.0), **SHAPE
    )


def test_llama_is_complete_without_what_has_a_default():
    """Old configs leave out what has a default: it must be transformers'."""
    needed = ("architectures", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    config = parse({k: LLAMA[k] for k in (*needed, "num_attention_heads")})
    assert (config.num_kv_heads, config.head_dim, config.max_model_len) == (9, 64, 2048)
    assert (config.norm_eps, config.activation, config.tie_word_embeddings) == (1e-6, "silu", False)
    assert (config.eos_token_ids, config.dtype, config.rope) == ((2,), "float32", RopeConfig(theta=10000.0))


def test_llama_biases_and_head_dim():
    """Ignoring a bias or another head size would compute another model."""
    config = parse({**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 32})
    assert (config.qkv_bias, config.out_bias, config.mlp_bias, config.head_dim) == (True, True, True, 32)
    config = parse({**LLAMA, "mlp_bias": True, "head_dim": None})
    assert (config.qkv_bias, config.out_bias, config.mlp_bias, config.head_dim) == (False, False, True, 64)


def test_hp1():
    """Every field of an HP1 config arrives."""
    config = parse({**HP1, "rope_theta": 500.0, "fir_k": 5, "relu_pre": False, "clip_min": -1, "clip_max": 2.5})
    assert config == ModelConfig(
        family="hp1",
        head_dim=128,
        activation="relu",
        rope=RopeConfig(theta=500.0),
        hp1=HP1Config(fir_k=5, relu_pre=False, clip_min=-1.0, clip_max=2.5),
        **SHAPE,
    )


def test_hp1_is_complete_without_what_has_a_default():
    """Fields with a default may be left out."""
    needed = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    config = parse({k: HP1[k] for k in (*needed, "num_attention_heads", "max_position_embeddings")})
    assert (config.hp1, config.activation) == (HP1Config(), "relu")
    assert (config.num_kv_heads, config.head_dim, config.tie_word_embeddings) == (9, 64, False)
    assert (config.eos_token_ids, config.dtype, config.rope) == ((), "float32", RopeConfig(theta=10000.0))


def test_mistral():
    """It is a Llama with a sliding window in every layer."""
    config = parse(of("MistralForCausalLM", sliding_window=7))
    assert (config.family, config.sliding_windows) == ("llama", (7, 7, 7))
    assert (config.qkv_bias, config.out_bias, config.mlp_bias) == (False, False, False)


def test_mistral_window():
    """null switches the window off; a missing one is transformers' 4096."""
    assert parse({**of("MistralForCausalLM"), "sliding_window": None}).sliding_windows == ()
    assert parse(of("MistralForCausalLM")).sliding_windows == (4096,) * 3


def test_mistral_defaults():
    """A missing number of KV heads is 8, and null means one for each head, as in transformers."""
    values = of("MistralForCausalLM", num_key_value_heads=None, num_attention_heads=16, head_dim=36)
    assert parse(values).num_kv_heads == 8
    assert parse({**of("MistralForCausalLM"), "num_key_value_heads": None}).num_kv_heads == 9


def test_qwen2():
    """It has biases at q, k and v only, and a window only if that is switched on."""
    config = parse(of("Qwen2ForCausalLM", sliding_window=9, use_sliding_window=False, eos_token_id=None))
    assert (config.qkv_bias, config.out_bias, config.mlp_bias, config.qk_norm) == (True, False, False, False)
    assert (config.sliding_windows, config.eos_token_ids) == ((), ())


def test_qwen3():
    """It has norms on q and k, and its head size is 128 unless the config says otherwise."""
    config = parse(of("Qwen3ForCausalLM", head_dim=24))
    assert (config.qk_norm, config.qkv_bias, config.out_bias, config.head_dim) == (True, False, False, 24)
    assert parse(of("Qwen3ForCausalLM")).head_dim == 128
    config = parse(of("Qwen3ForCausalLM", attention_bias=True))
    assert (config.qkv_bias, config.out_bias) == (True, True)


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize(
    ("options", "windows"),
    [
        ({"max_window_layers": 1}, (0, 9, 9)),
        ({"max_window_layers": 0}, (9, 9, 9)),
        ({"max_window_layers": 3}, (0, 0, 0)),
        ({}, (0, 0, 0)),
        ({"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}, (9, 0, 9)),
        ({"layer_types": None, "max_window_layers": 2}, (0, 0, 9)),
    ],
)
def test_qwen_sliding_window(architecture, options, windows):
    """The window applies only to the layers that transformers gives one."""
    values = {**of(architecture), "use_sliding_window": True, "sliding_window": 9, **options}
    assert parse(values).sliding_windows == windows


@pytest.mark.parametrize("architecture", ["Qwen2ForCausalLM", "Qwen3ForCausalLM"])
def test_qwen_sliding_window_without_a_size_is_transformers_4096(architecture):
    """The missing size must not become a window of all keys."""
    values = {**of(architecture), "use_sliding_window": True, "max_window_layers": 1}
    assert parse(values).sliding_windows == (0, 4096, 4096)


@pytest.mark.parametrize(
    "options",
    [
        {"rope_theta": 500000.0},
        {"rope_theta": 500000.0, "rope_scaling": None},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}},
        {"rope_parameters": {"rope_theta": 500000}},
    ],
)
def test_rope_theta_of_transformers_4_and_5(options):
    """The two versions write it in different places."""
    assert parse({**LLAMA, **options}).rope == RopeConfig(theta=500000.0)


@pytest.mark.parametrize(
    "options",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3_ROPE}},
        {"rope_theta": 500000.0, "rope_scaling": {"type": "llama3", **LLAMA3_ROPE}},
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3_ROPE}},
    ],
)
def test_llama3_rope_of_transformers_4_and_5(options):
    """The two versions write it in different places, under two names."""
    assert parse({**LLAMA, **options}).rope == RopeConfig(theta=500000.0, scaling="llama3", **LLAMA3_ROPE)


@pytest.mark.parametrize(
    "options",
    [
        {"rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope_scaling": {"rope_type": "linear", "factor": 4}},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    ],
)
def test_linear_rope_of_transformers_4_and_5(options):
    """The two versions write it in different places, under two names."""
    assert parse({**LLAMA, **options}).rope == RopeConfig(scaling="linear", factor=4.0)


def test_llama3_rope_without_its_trained_length_takes_the_models():
    """The model's own length is transformers' default."""
    scaling = {k: v for k, v in LLAMA3_ROPE.items() if k != "original_max_position_embeddings"}
    rope = parse({**LLAMA, "rope_scaling": {"rope_type": "llama3", **scaling}}).rope
    assert rope.original_max_position_embeddings == 8192


@pytest.mark.parametrize(("stored", "ids"), [(5, (5,)), ([5, 7], (5, 7)), (None, ()), ([], ()), (0, (0,))])
def test_eos_is_a_number_a_list_or_nothing(stored, ids):
    """All three forms occur; 0 is a token, not nothing."""
    assert parse({**LLAMA, "eos_token_id": stored}).eos_token_ids == ids


@pytest.mark.parametrize(
    ("options", "dtype"),
    [
        ({"dtype": "float16"}, "float16"),
        ({"dtype": None, "torch_dtype": "float16"}, "float16"),
        ({"dtype": "bfloat16", "torch_dtype": "float16"}, "bfloat16"),
        ({"dtype": None}, "float32"),
        ({"dtype": "float64"}, "float32"),
        ({"dtype": None, "torch_dtype": "float8_e4m3fn"}, "bfloat16"),
    ],
)
def test_dtype_by_its_new_and_old_name(options, dtype):
    """``dtype`` replaced ``torch_dtype`` in transformers 5."""
    assert parse({**LLAMA, **options}).dtype == dtype


@pytest.mark.parametrize("model_type", ["gpt2", "llama", "mistral", "qwen2", "qwen3", "hp1"])
def test_model_type_serves_where_no_architecture_is_named(model_type):
    """Some configs name only the model type."""
    values = {**GPT2, **(HP1 if model_type == "hp1" else LLAMA), "model_type": model_type, "architectures": None}
    assert parse(values).family == (model_type if model_type in ("gpt2", "hp1") else "llama")


@pytest.mark.parametrize(
    "values",
    [
        {**LLAMA, "architectures": ["FalconForCausalLM"]},
        {**LLAMA, "architectures": [], "model_type": "falcon"},
        {"model_type": "falcon"},
        {**LLAMA, "architectures": ["LlamaForQuestionAnswering"]},
    ],
)
def test_other_architectures_are_refused(values):
    """The message names the architecture and says where those are that are supported."""
    with pytest.raises(UserError, match=r"^config\.json: .* is not supported; docs/models.md lists what is$") as caught:
        parse(values)
    assert (values.get("architectures") or [values["model_type"]])[0] in str(caught.value)


@pytest.mark.parametrize("named", [[["x"]], {"x": 1}, [{}], [None, "LlamaForCausalLM"], 3])
def test_an_architecture_that_is_no_name(tmp_path, named):
    """It was a TypeError, before anything could say which file is wrong."""
    (tmp_path / "config.json").write_text(json.dumps({"architectures": named}))
    assert not is_native(tmp_path)


def test_an_empty_config_is_refused():
    """It must give a UserError, not a KeyError."""
    with pytest.raises(UserError, match="None is not supported"):
        parse({})


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**LLAMA, "rope_scaling": {"rope_type": "ntk", "factor": 2.0}}, "rope_type 'ntk' is not supported"),
        ({**LLAMA, "rope_parameters": {"rope_type": "longrope"}}, "'short_factor' is missing"),
        ({**LLAMA, "rope_scaling": {"type": "linear"}}, "'factor' is missing"),
        ({**LLAMA, "rope_scaling": {"type": "llama3", "factor": 2.0}}, "'low_freq_factor' is missing"),
        ({**LLAMA, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({**LLAMA, "rope_scaling": "linear"}, "config.json"),
        ({**LLAMA, "hidden_act": "relu6"}, "hidden_act 'relu6' is not supported; supported are silu"),
        ({**GPT2, "activation_function": "swish"}, "activation_function 'swish' is not supported; supported are gelu"),
        ({**LLAMA, "quantization_config": {"bits": 4}}, "quantization_config: quant_method None is not supported"),
        ({**LLAMA, "quantization_config": [4]}, "quantization_config is no object"),
        ({k: v for k, v in LLAMA.items() if k != "hidden_size"}, "'hidden_size' is missing"),
        ({k: v for k, v in GPT2.items() if k != "n_head"}, "'n_head' is missing"),
        ({**GPT2, "n_head": 0}, "config.json"),
        ({**LLAMA, "num_attention_heads": 8, "num_key_value_heads": 3}, "num_heads 8 is no multiple"),
        ({**LLAMA, "hidden_size": "576"}, "config.json"),
        ({**LLAMA, "vocab_size": 1.5}, "vocab_size"),
        ({**LLAMA, "eos_token_id": "2"}, "eos_token_id must be a token id or a list of them, got '2'"),
        ({**LLAMA, "dtype": "int8"}, "dtype"),
        ({**HP1, "hidden_act": "silu"}, "hidden_act 'silu' is not supported; supported are relu"),
        ({**HP1, "attention_bias": True}, "attention_bias is not supported"),
        ({**HP1, "use_sliding_window": True}, "use_sliding_window is not supported"),
        ({**HP1, "clip_min": 2.0}, "clip_min 2.0 is above clip_max 1.0"),
        ({**HP1, "clip_max": float("inf")}, "clip_min and clip_max must be finite"),
        ({**HP1, "relu_pre": "yes"}, "relu_pre"),
        ({**HP1, "fir_k": 9}, "fir_k must be in [1, 8], got 9"),
        ({**HP1, "fir_k": 2.5}, "fir_k"),
        ({k: v for k, v in HP1.items() if k != "max_position_embeddings"}, "'max_position_embeddings' is missing"),
    ],
)
def test_what_is_wrong_is_a_user_error_that_says_so(values, message):
    """Each mistake gives one line that begins with the file's name."""
    with pytest.raises(UserError) as caught:
        parse(values)
    assert message in str(caught.value)
    assert str(caught.value).startswith("config.json: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("depth", ["top", "text_config"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("is_causal", False),
        ("per_layer_config", {"1": {"intermediate_size": 8}}),
        ("attn_logit_softcapping", 50.0),
        ("embedding_multiplier", 12),
        ("logit_scale", 0.0),
        ("rotary_pct", 0.25),
        ("num_local_experts", 8),
        ("use_qk_norm", True),
        ("unpadded_vocab_size", 100),
    ],
)
def test_a_key_that_changes_the_computation_and_is_not_read_is_refused(name, value, depth):
    """transformers makes masks of both sides for the first, and other layers for the second; all were dropped."""
    values = {**LLAMA, name: value}
    if depth != "top":
        values = {"architectures": ["LlavaForConditionalGeneration"], "text_config": values}
    with pytest.raises(UserError, match=f"^config.json: {name} is not supported"):
        parse(values)


@pytest.mark.parametrize(
    "values",
    [
        {"is_causal": True, "per_layer_config": None, "rotary_pct": 1.0, "num_experts": 0, "use_qk_norm": False},
        {"use_cache": True, "transformers.js_config": {"dtype": "q4"}, "unsloth_fixed": True, "pretraining_tp": 1},
    ],
)
def test_keys_that_change_nothing_are_taken(values):
    """Folders of the Hub hold many."""
    assert parse({**LLAMA, **values}) == parse(LLAMA)


@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("name", ["attn_factor", "alpha", "full_attention", "x\ny"])
def test_an_unknown_member_of_rope_is_refused(name, place):
    """A factor that is not read would turn every key by another angle."""
    rope = {"rope_type": "yarn", "factor": 2.0, "mrope_section": [1, 2], "finetuned": True}
    parse({**LLAMA, place: rope | {name: None}})
    with pytest.raises(UserError, match=r"rope_parameters\.\S+ is not supported"):
        parse({**LLAMA, place: rope | {name: 0.5}})


def test_end_tokens_of_generation_config_are_named_by_its_file(tmp_path):
    """config.json was blamed."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": ["2"]}))
    with pytest.raises(UserError, match=r"generation_config\.json: eos_token_id must be a token id or a list of them"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("params.json", r"params\.json is Mistral's own form"),
        ("model.safetensors", r"a model folder holds config\.json"),
    ],
)
def test_folders_without_a_config_say_what_they_are(tmp_path, file, message):
    """ "No such file" sent people to look for a file that there never was."""
    (tmp_path / file).write_text(json.dumps({"base_model_name_or_path": "org/base"}))
    with pytest.raises(UserError, match=message):
        read_model_config(tmp_path)


def test_folder(tmp_path):
    """The config is read from the folder."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_model_config(tmp_path) == parse(LLAMA)


@pytest.mark.parametrize(
    ("generation", "ids"),
    [
        ({"eos_token_id": [128001, 128009], "temperature": 0.6}, (128001, 128009)),
        ({"eos_token_id": 7}, (7,)),
        # Without the field config.json still counts; null erased its token.
        ({"temperature": 0.6}, (2,)),
        ({"eos_token_id": None}, (2,)),
    ],
)
def test_generation_config_wins_for_the_end_tokens(tmp_path, generation, ids):
    """Chat models list further end tokens there: without them answers never end."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert read_model_config(tmp_path).eos_token_ids == ids


def test_generation_config_changes_nothing_else(tmp_path):
    """Its other fields must not change the shape."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "generation_config.json").write_text(json.dumps({"vocab_size": 3, "dtype": "float16"}))
    assert read_model_config(tmp_path) == parse(LLAMA)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "no such file; a model folder holds config.json"),
        ("config.json", b"{", "config.json: "),
        ("config.json", b"\xff\xfe", "config.json: "),
        ("config.json", b"[]", "not a JSON object"),
        ("generation_config.json", b"{", "generation_config.json: "),
        ("generation_config.json", b"3", "not a JSON object"),
    ],
)
def test_broken_files(tmp_path, name, content, message):
    """The message has the path of the missing or broken file."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    path = tmp_path / name
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        read_model_config(tmp_path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))


def test_an_activation_in_a_file_of_its_own(tmp_path):
    """It wins over config.json's, and only a class with a head has any use for the file, which may be broken."""
    own = tmp_path / "config_sentence_transformers.json"
    own.write_text(json.dumps({"activation_fn": "torch.nn.modules.linear.Identity"}))
    values = of("LlamaForSequenceClassification", model_type="llama", num_labels=1)
    values["sentence_transformers"] = {"activation_fn": "torch.nn.modules.activation.Sigmoid"}
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert read_model_config(tmp_path).classifier.activation == "none"
    own.write_text("{")
    with pytest.raises(UserError, match="config_sentence_transformers"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert read_model_config(tmp_path).classifier is None
