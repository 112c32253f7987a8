"""config.json of the families: transformers' defaults, both forms of positions, and options that are refused."""

import contextlib
import itertools
import json
import math

import pytest

from rosebatch.config.model import RopeConfig
from rosebatch.core.errors import UserError
from rosebatch.model.hf.config import parse_model_config
from rosebatch.model.registry import ARCHITECTURES
from rosebatch.model.text_parts import TEXT_DEFAULTS, WHOLES
from tests.model.odd_folders import ODD_VALUES

SIZES = {
    "vocab_size": 300,
    "hidden_size": 2048,
    "intermediate_size": 40,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
}
FACTORS = {"short_factor": [1.0] * 32, "long_factor": [2.0] * 32}


def parse(architecture, **values):
    return parse_model_config({"architectures": [architecture], **SIZES, **values}, "config.json")


def theirs(architecture, **values):
    """transformers' config of the language model."""
    import transformers

    kind = architecture.replace("ForCausalLM", "Config")
    text = architecture.partition("For")[0]
    kind = f"{text}TextConfig" if text in ("Gemma3", "Gemma4", "Gemma4Unified", "Qwen3_5", "Qwen3_5Moe") else kind
    return getattr(transformers, kind)(**SIZES, **values)


ENCODERS = [n for n, a in ARCHITECTURES.items() if n.endswith("Model") and a.model_type not in ("gpt2", "new")]
# As DistilBERT names the same sizes.
_DISTILLED = {"vocab_size": 300, "dim": 2048, "hidden_dim": 40, "n_layers": 8, "n_heads": 32}


@pytest.mark.parametrize("name", ENCODERS)
def test_defaults_of_encoders_are_transformers_own(name):
    """A folder that leaves out what equals the defaults is the model of one that has all."""
    import transformers

    sizes = _DISTILLED if name == "DistilBertModel" else SIZES
    kind = name.replace("Model", "Config")
    whole = {**getattr(transformers, kind)(**sizes).to_dict(), "architectures": [name], "dtype": None}
    found = parse_model_config({**sizes, "architectures": [name]}, "config.json")
    assert found == parse_model_config(whole, "config.json")
    assert not found.head


# Their own defaults are models of Mamba2 alone, of fewer layers than these, or without experts.
LAYERS = {
    "Gemma4ForCausalLM": {
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
    },
    "BambaForCausalLM": {"attn_layer_indices": [1]},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["linear_attention", "full_attention"] * 4},
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"] * 4},
    "NemotronHForCausalLM": {"layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"] * 2},
}
# Of experts: their number, and the inner size of one for all tokens.
COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
SHARED = ("shared_expert_intermediate_size", "shared_intermediate_size", "moe_shared_expert_intermediate_size")


def first_of(config, names):
    return next((found for name in names if (found := getattr(config, name, None)) is not None), 0)


@pytest.mark.parametrize("name", [n for n in ARCHITECTURES if n.endswith("CausalLM") and n != "HP1ForCausalLM"])
def test_defaults_are_transformers_own(name):
    """With only the sizes given, all other values equal those of transformers' config class."""
    # transformers' class of DeepSeek V2 has no experts of a token.
    served = LAYERS.get(name, {}) | ({"num_experts_per_tok": 6} if name == "DeepseekV2ForCausalLM" else {})
    expected = theirs(name, **served)
    config = parse(name, **served)
    heads = expected.num_attention_heads
    if config.full_heads:
        for layer in range(8):
            own, of_layer = config.of_layer(layer), expected.per_layer_config[layer]
            assert (own.num_kv_heads, own.head_dim) == (of_layer.num_key_value_heads, of_layer.head_dim)
    elif config.latent is None:
        assert config.num_kv_heads == (getattr(expected, "num_key_value_heads", None) or heads)
        assert config.head_dim == (getattr(expected, "head_dim", None) or expected.hidden_size // heads)
    else:
        assert (config.num_kv_heads, config.head_dim) == (1, expected.qk_head_dim)
        latent = config.latent
        assert (latent.rank, latent.value_dim, latent.q_rank) == (
            expected.kv_lora_rank,
            expected.v_head_dim,
            expected.q_lora_rank or 0,
        )
        assert latent.interleaved == getattr(expected, "rope_interleave", name == "DeepseekV2ForCausalLM")
    assert config.max_model_len == expected.max_position_embeddings
    fields = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon")
    assert config.norm_eps in [getattr(expected, field, None) for field in fields]
    # LFM2's has no field.
    fields = ("hidden_act", "hidden_activation", "mlp_hidden_act")
    assert config.activation == (first_of(expected, fields) or "silu")
    assert config.tie_word_embeddings == expected.tie_word_embeddings
    eos = expected.eos_token_id
    assert config.eos_token_ids == (() if eos is None else tuple(eos) if isinstance(eos, list) else (eos,))
    # A head for whole prompts passes over padding at their end.
    assert ARCHITECTURES[name].defaults.get("pad_token_id") == expected.pad_token_id
    kinds = getattr(expected, "layer_types", None)
    window = getattr(expected, "sliding_window", None) or 0
    if getattr(expected, "use_sliding_window", None) is False:
        window = 0
    windows = [window * (kinds is None or kind == "sliding_attention") for kind in kinds or [None] * 8]
    assert [config.sliding_window(layer) for layer in range(8)] == windows
    for layer, kind in enumerate(kinds or [None] * 8):
        rope = config.layer_rope(layer)
        if rope is None:
            continue
        parameters = expected.rope_parameters.get(kind, expected.rope_parameters)
        scaling = parameters.get("rope_type", "default")
        own, spread = config.of_layer(layer), 0
        if scaling == "proportional":
            scaling, spread = "default", own.head_dim
        assert (rope.theta, rope.scaling) == (parameters["rope_theta"], scaling)
        assert scaling == "yarn" or rope == RopeConfig(theta=rope.theta, spread=spread)
        whole = own.rotary_dim if config.latent else own.head_dim
        assert own.rotary_size == int(whole * (parameters.get("partial_rotary_factor") or 1))
    assert ARCHITECTURES[name].experts == (config.experts is not None)
    if config.experts is not None:
        experts, size = config.experts, getattr(expected, "moe_intermediate_size", expected.intermediate_size)
        if kinds and "moe" in kinds:
            assert list(experts.layers) == [kind == "moe" for kind in kinds]
        else:
            dense = first_of(expected, ("first_k_dense_replace", "num_dense_layers"))
            mlps = getattr(expected, "mlp_layer_types", ["dense"] * dense + ["sparse"] * (8 - dense))
            assert experts.layers == tuple(kind == "sparse" for kind in mlps)
        assert (experts.num_experts, experts.expert_size) == (first_of(expected, COUNTS), size)
        assert experts.experts_per_token == first_of(expected, ("num_experts_per_tok", "top_k_experts"))
        shared = getattr(expected, "n_shared_experts", 0) * size
        assert experts.shared_size == (first_of(expected, SHARED) or shared)
        assert experts.weight_scale == getattr(expected, "routed_scaling_factor", 1)
        grouped = getattr(expected, "n_group", 1), getattr(expected, "topk_group", 1)
        assert (experts.groups, experts.kept_groups) == (grouped if experts.sigmoid else (1, 1))
        # Without such a field, the weights always sum to 1.
        assert experts.normalize == getattr(expected, "norm_topk_prob", True)


def test_scaled_positions_of_deepseek_v3_change_scores():
    """Its file multiplies scores, and not the tables: a model that left it out would attend twice as flat."""
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}
    scaling |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    config = parse("DeepseekV3ForCausalLM", rope_scaling=scaling, max_position_embeddings=163840)
    growth = 0.1 * math.log(40) + 1
    assert config.attention_scales == (192**-0.5 * growth**2,) * 8
    assert config.rope.attention_factor == 1
    assert parse("DeepseekV3ForCausalLM").attention_scales == ()


@pytest.mark.parametrize(
    ("architecture", "once", "twice"),
    [
        ("Qwen3NextForCausalLM", {"rope_parameters": {"partial_rotary_factor": 0.5}}, {"partial_rotary_factor": 0.5}),
        ("StableLmForCausalLM", {"rope_parameters": {"partial_rotary_factor": 0.5}}, {"partial_rotary_factor": 0.25}),
        ("MixtralForCausalLM", {"num_local_experts": 4}, {"num_experts": 4}),
        ("Qwen3MoeForCausalLM", {"num_experts": 16}, {"num_local_experts": 16, "n_routed_experts": 16}),
    ],
)
def test_a_value_that_stands_twice_is_read(architecture, once, twice):
    """transformers 5.17 writes the rotated share inside of ``rope_parameters`` and beside it: such files were refused.

    Where both differ, transformers takes the one inside.
    """
    assert parse(architecture, **once, **twice) == parse(architecture, **once)


def test_names_of_experts_excuse_no_other():
    """Two names with the same number must not excuse each other in a family without experts."""
    with pytest.raises(UserError, match="num_experts is not supported"):
        parse("LlamaForCausalLM", num_experts=4, num_local_experts=4)


@pytest.mark.parametrize("name", WHOLES)
@pytest.mark.parametrize("of_text", [None, True, False])
def test_who_says_whether_embeddings_are_tied(name, of_text):
    """transformers asks the whole model's config. A folder whose text part alone says so may have no head."""
    text = SIZES if of_text is None else {**SIZES, "tie_word_embeddings": of_text}
    for tied in (None, True, False):
        expected = WHOLES[name].tied if tied is None else tied
        config = parse(name, tie_word_embeddings=tied, text_config=text)
        assert config.tie_word_embeddings is (expected or bool(of_text))


@pytest.mark.parametrize("kind", TEXT_DEFAULTS)
def test_sizes_that_a_text_part_leaves_out(kind):
    """LLaVA's folders hold only what differs from the default of the part's config class."""
    import transformers

    expected = transformers.CONFIG_MAPPING[kind]()
    config = parse("LlavaForConditionalGeneration", text_config={"model_type": kind})
    assert (config.vocab_size, config.hidden_size) == (expected.vocab_size, expected.hidden_size)
    assert (config.num_layers, config.num_heads) == (expected.num_hidden_layers, expected.num_attention_heads)
    assert config.num_kv_heads == expected.num_key_value_heads
    assert config.head_dim == (getattr(expected, "head_dim", None) or config.hidden_size // config.num_heads)
    assert config.intermediate_size == getattr(expected, "intermediate_size", expected.hidden_size)
    assert config.max_model_len == expected.max_position_embeddings
    assert config.norm_eps == getattr(expected, "rms_norm_eps", 1e-5)
    assert config.rope.theta == expected.rope_parameters["rope_theta"]
    eos = getattr(expected, "eos_token_id", None)
    assert config.eos_token_ids == (() if eos is None else (eos,))
    if config.experts:
        experts = expected.num_experts, expected.num_experts_per_tok
        assert (config.experts.num_experts, config.experts.experts_per_token) == experts


@pytest.mark.parametrize("kind", ["falcon", 3, ["llama"], "gpt_bigcode"])
def test_a_text_part_of_another_type_is_refused_by_name(kind):
    """It was "no causal language model of this type", which is said of the whole."""
    with pytest.raises(UserError, match=r"text_config of type .* is not supported"):
        parse("LlavaForConditionalGeneration", text_config={"model_type": kind})


@pytest.mark.parametrize("name", ["Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"])
def test_gemma_3_of_transformers_4(name):
    """Its folders leave out sizes, and write positions and windows by other names than those of transformers 5."""
    text = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 12}
    text |= {
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
        "sliding_window_pattern": 3,
    }
    values = {"text_config": text, "eos_token_id": [1, 106], "torch_dtype": "bfloat16"}
    values |= {} if "Conditional" in name else text
    config = parse_model_config({"architectures": [name], **values}, "config.json")
    assert (config.vocab_size, config.num_heads, config.num_kv_heads, config.head_dim) == (262208, 8, 4, 256)
    assert config.sliding_windows == (1024, 1024, 0) * 4
    assert config.layer_rope(2) == RopeConfig(theta=1e6, scaling="linear", factor=8.0)
    assert config.layer_rope(0) == RopeConfig(theta=1e4)
    assert (config.eos_token_ids, config.dtype, config.attention_scale(0)) == ((1, 106), "bfloat16", 1 / 16)


def test_heads_of_gemma_4_in_both_forms():
    """The Hub's files name the heads of full layers once; transformers 5.24 writes them for each of these layers."""
    named = {"attention_k_eq_v": True, "num_global_key_value_heads": 2, "global_head_dim": 96}
    plain = {"hidden_size_per_layer_input": 0, "num_key_value_heads": 8, "head_dim": 64}
    config = parse("Gemma4ForCausalLM", **plain, **named)
    heads = {"head_dim": 96, "num_key_value_heads": 2}
    by_layer = {"attention_k_eq_v": True, "per_layer_config": {"5": heads, "7": heads}}
    assert parse("Gemma4ForCausalLM", **plain, **by_layer) == config
    assert config.sliding_windows == (512,) * 5 + (0, 512, 0)
    full = config.full_heads
    assert (full.num_kv_heads, full.head_dim, full.rotary_dim, full.keys_are_values) == (2, 96, 24, True)
    assert config.layer_rope(7) == RopeConfig(theta=1e6, spread=96)
    # Without the first, the second has no effect in transformers either.
    assert parse("Gemma4ForCausalLM", **plain, **{**named, "attention_k_eq_v": False}).full_heads.num_kv_heads == 8
    unlike = {"5": heads, "7": {**heads, "num_key_value_heads": 4}}
    for wrong in ({"5": heads}, unlike, {**by_layer["per_layer_config"], "0": heads}):
        with pytest.raises(UserError, match="per_layer_config must say the same heads of all full layers"):
            parse("Gemma4ForCausalLM", **plain, per_layer_config=wrong)


def test_layers_of_gemma_4_that_cannot_share():
    """A layer that shares needs one of its kind before it: the others' keys have another size."""
    values = {"hidden_size_per_layer_input": 0, "use_double_wide_mlp": True}
    config = parse("Gemma4ForCausalLM", **values, num_kv_shared_layers=2)
    assert [config.kv_layer(layer) for layer in range(8)] == [0, 1, 2, 3, 4, 5, 4, 5]
    assert [config.inner_size(layer) for layer in range(8)] == [40] * 6 + [80] * 2
    assert len(config.kv_planes) == len(config.kv_windows) == 6
    with pytest.raises(UserError, match="layers that share K and V need one with the same window before them"):
        parse("Gemma4ForCausalLM", **values, num_kv_shared_layers=3)


def test_a_part_that_is_no_object_is_refused():
    """It must give a UserError, not an AttributeError."""
    with pytest.raises(UserError, match="text_config is no object: 3"):
        parse("Gemma3ForConditionalGeneration", text_config=3)


@pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("beside", [True, False])
def test_phi_3s_long_positions(kind, beside):
    """Former names of longrope, and the trained length beside the scaling, which wins."""
    scaling = {"type": kind, **FACTORS, "original_max_position_embeddings": 512}
    trained = {"original_max_position_embeddings": 1024} if beside else {}
    config = parse("Phi3ForCausalLM", max_position_embeddings=16384, rope_scaling=scaling, **trained)
    original = 1024 if beside else 4096
    assert (config.rope.scaling, config.rope.original_max_position_embeddings) == ("longrope", original)
    assert config.rope.attention_factor == pytest.approx(math.sqrt(1 + math.log(16384 / original) / math.log(original)))


def test_phi_4_minis_window_of_more_than_all_tokens():
    """It hides nothing: kernels and the cache need not know it."""
    assert not any(parse("Phi3ForCausalLM", sliding_window=4096).sliding_windows)
    assert parse("Phi3ForCausalLM", sliding_window=2047).sliding_windows == (2047,) * 8


def test_longrope_needs_a_factor_for_each_pair():
    """Another number of factors would fail in the middle of loading."""
    with pytest.raises(UserError, match="short_factor has 32 values for 16 pairs of channels"):
        parse("Phi3ForCausalLM", rope_scaling={"type": "longrope", **FACTORS}, partial_rotary_factor=0.5)


def test_longrope_is_for_all_layers_alike():
    """With other positions in sliding layers, building the engine would fail."""
    rope = {"type": "longrope", **FACTORS, "original_max_position_embeddings": 512}
    with pytest.raises(UserError, match="longrope is for all layers alike"):
        parse("Gemma3ForCausalLM", rope_scaling=rope, sliding_window=7, layer_types=["sliding_attention"] * 8)


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({}, 0.1 * math.log(4.0) + 1),
        ({"attention_factor": 0.7}, 0.7),
        ({"mscale": 0.5, "mscale_all_dim": 2.0}, (0.05 * math.log(4.0) + 1) / (0.2 * math.log(4.0) + 1)),
        ({"factor": None, "original_max_position_embeddings": 512}, 0.1 * math.log(4.0) + 1),
    ],
)
def test_yarns_attention_factor(options, factor):
    """Without it scores would be off by this factor, squared."""
    rope = parse("LlamaForCausalLM", rope_scaling={"type": "yarn", "factor": 4.0, **options}).rope
    assert (rope.attention_factor, rope.factor) == (pytest.approx(factor), 4.0)


def test_olmo_3_scales_full_layers_only():
    """transformers 4 wrote one scaling; sliding layers never had it."""
    scaling = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 512, "attention_factor": 1.2}
    config = parse("Olmo3ForCausalLM", rope_theta=5e5, rope_scaling=scaling)
    assert [config.layer_rope(layer).scaling for layer in range(4)] == ["default"] * 3 + ["yarn"]
    assert {config.layer_rope(layer).theta for layer in range(4)} == {5e5}


@pytest.mark.parametrize(
    ("values", "rotary"),
    [
        ({}, True),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}, True),
        ({"rope_parameters": None}, False),
        ({"rope_parameters": {"rope_type": None}}, False),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": None}}, False),
    ],
)
def test_positions_of_olmo_hybrid(values, rotary):
    """The released model has none, which its files said in several ways: rotated, its keys would be others."""
    config = parse("OlmoHybridForCausalLM", **values)
    assert all((config.layer_rope(layer) is not None) == rotary for layer in range(8))


def test_kimi_linear_as_its_own_files_say_it():
    """They have an object for the rule, which counts layers from 1, and other names than DeepSeek's."""
    rule = {"head_dim": 96, "num_heads": 24, "short_conv_kernel_size": 3}
    rule |= {"kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8]}
    values = {"num_experts": 64, "num_experts_per_token": 6, "num_shared_experts": 2, "moe_renormalize": False}
    values |= {"model_max_length": 4096, "first_k_dense_replace": 2, "rope_theta": 10000.0}
    values |= {"head_dim": 72, "mla_use_nope": True, "moe_router_activation_func": "sigmoid", "moe_layer_freq": 1}
    values |= {"num_key_value_heads": 32, "use_grouped_topk": True, "num_nextn_predict_layers": 0}
    config = parse("KimiLinearForCausalLM", linear_attn_config=rule, rope_scaling=None, **values)
    expected = theirs("KimiLinearForCausalLM", linear_attn_config=rule, **values)
    delta, experts = config.delta, config.experts
    assert delta.layers == tuple(kind == "linear_attention" for kind in expected.layer_types)
    assert (delta.key_heads, delta.value_heads, delta.key_dim, delta.value_dim, delta.taps) == (24, 24, 96, 96, 3)
    assert experts.layers == tuple(kind == "sparse" for kind in expected.mlp_layer_types)
    assert (experts.num_experts, experts.experts_per_token, experts.shared_size) == (64, 6, 2 * 1024)
    assert not experts.normalize and config.max_model_len == 4096
    assert not any(config.layer_rope(layer) for layer in range(8))


def test_sizes_of_olmo_hybrids_rule():
    """They follow from those of attention where config.json leaves them out."""
    expected = theirs("OlmoHybridForCausalLM")
    delta = parse("OlmoHybridForCausalLM").delta
    assert (delta.key_heads, delta.value_heads) == (expected.linear_num_key_heads, expected.linear_num_value_heads)
    assert (delta.key_dim, delta.value_dim) == (expected.linear_key_head_dim, expected.linear_value_head_dim)
    assert delta.layers == tuple(kind == "linear_attention" for kind in expected.layer_types)
    assert delta.max_beta == 2
    assert parse("OlmoHybridForCausalLM", linear_allow_neg_eigval=False).delta.max_beta == 1


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Gemma2ForCausalLM", {"use_bidirectional_attention": True}, "use_bidirectional_attention is not supported"),
        ("Gemma4ForCausalLM", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not"),
        ("Gemma3ForCausalLM", {"layer_types": ["chunked_attention"] * 8}, "layer_types 'chunked_attention'"),
        ("CohereForCausalLM", {"partial_rotary_factor": 0.5}, "partial_rotary_factor other than 1"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "proportional"}}, "rope_type 'proportional'"),
        ("Phi3ForCausalLM", {"hidden_act": "mish"}, "hidden_act 'mish'"),
    ],
)
def test_what_is_not_served_says_what_may_serve_it(name, options, message):
    """One line: the field, and the flag that may run the model nevertheless."""
    with pytest.raises(UserError) as caught:
        parse(name, **options)
    assert message in str(caught.value)
    assert str(caught.value).endswith("; --model-impl transformers may run it")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("Gemma2ForCausalLM", {"sliding_window": None}, "sliding_window must be a whole number > 0, got None"),
        ("Gemma3ForCausalLM", {"sliding_window_pattern": 0}, "sliding_window_pattern must be a whole number > 0"),
        ("Gemma3ForCausalLM", {"layer_types": ["full_attention"]}, "sliding_windows has 1 values for 8 layers"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [2] * 8}, "no_rope_layers must be a list of 0 and 1"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1]}, "rotary_layers has 1 values for 8 layers"),
        ("StableLmForCausalLM", {"partial_rotary_factor": 0.001}, "leaves no channel of 64 to rotate"),
        ("GPTNeoXForCausalLM", {"rotary_pct": 1.5}, "rotary_pct must be in (0, 1], got 1.5"),
        # transformers rotates so many channels; it was dropped.
        (
            "GPTNeoXForCausalLM",
            {"head_dim": 4},
            "head_dim other than hidden_size / num_attention_heads is not supported",
        ),
        # The convolutions kept SiLU.
        (
            "Qwen3_5ForCausalLM",
            {"hidden_act": "relu", "layer_types": ["full_attention"] * 8},
            "hidden_act 'relu' is not",
        ),
        # Beside the positions of each type of layer.
        ("Olmo3ForCausalLM", {"rope_parameters": {"full_attention": {}, "alpha": 2.0}}, "rope_parameters.alpha is not"),
        ("GraniteForCausalLM", {"logits_scaling": 0}, "division by zero"),
        ("GraniteMoeHybridForCausalLM", {}, "a model whose layers all have Mamba2 alone is not supported"),
        ("GraniteMoeHybridForCausalLM", {"layer_types": ["conv"] * 8}, "layer_types 'conv' is not supported"),
        ("BambaForCausalLM", {"attn_layer_indices": [1], "mamba_n_heads": 3}, "3 heads of Mamba2 of 1365 channels"),
        (
            "BambaForCausalLM",
            {"attn_layer_indices": [1], "time_step_limit": [0.01, 1.0]},
            "time_step_limit [0.01, 1.0]",
        ),
        # transformers' convolution has it, and ours has SiLU.
        ("BambaForCausalLM", {"attn_layer_indices": [1], "hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ("NemotronHForCausalLM", {"layers_block_type": ["M", "x"]}, "layers_block_type 'x' is not supported"),
        (
            "NemotronHForCausalLM",
            {"hybrid_override_pattern": "M*E", "n_group": 2},
            "n_group 2 is not supported: experts",
        ),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "M*E", "moe_latent_size": 8}, "moe_latent_size is not"),
        ("FalconH1ForCausalLM", {"projectors_bias": True}, "projectors_bias is not supported"),
        (
            "FalconH1ForCausalLM",
            {"mamba_rms_norm": True},
            "mamba_norm_before_gate is not supported with mamba_rms_norm",
        ),
        ("FalconH1ForCausalLM", {"ssm_multipliers": [1.0]}, "ssm_multipliers must be a list of 5 numbers"),
        ("DeepseekV3ForCausalLM", {"attention_bias": True}, "attention_bias is not supported"),
        ("DeepseekV3ForCausalLM", {"num_key_value_heads": 8}, "num_key_value_heads must be 32, as many as heads"),
        ("DeepseekV3ForCausalLM", {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        ("DeepseekV3ForCausalLM", {"moe_layer_freq": 2}, "moe_layer_freq 2 is not supported"),
        ("DeepseekV3ForCausalLM", {"n_group": 7}, "num_experts 256 is no multiple of groups 7"),
        ("DeepseekV3ForCausalLM", {"topk_group": 9}, "kept_groups must be in"),
        ("DeepseekV2ForCausalLM", {"norm_topk_prob": True}, "norm_topk_prob is not supported"),
        ("DeepseekV2ForCausalLM", {"topk_method": "noaux_tc"}, "topk_method 'noaux_tc' is not supported"),
        ("MiniCPM3ForCausalLM", {"qk_rope_head_dim": 31}, "rotary_dim 31 is odd"),
        ("KimiLinearForCausalLM", {"mla_use_nope": False}, "mla_use_nope false is not supported"),
        ("KimiLinearForCausalLM", {"moe_router_activation_func": "softmax"}, "moe_router_activation_func 'softmax'"),
        ("KimiLinearForCausalLM", {"linear_attn_config": 3}, "linear_attn_config is no object: 3"),
        (
            "KimiLinearForCausalLM",
            {"linear_attn_config": {"kda_layers": [1, 2, 3, 4], "full_attn_layers": [4, 5, 6, 7, 8]}},
            "full_attn_layers and kda_layers are not layers 1 to 8, each once",
        ),
        ("KimiLinearForCausalLM", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("OlmoHybridForCausalLM", {"layer_types": ["linear_attention"] * 8}, "layers all have the delta rule"),
        ("OlmoHybridForCausalLM", {"layer_types": ["conv"] * 8}, "layer_types 'conv' is not supported"),
        ("OlmoHybridForCausalLM", {"hidden_act": "relu"}, "hidden_act 'relu' is not supported"),
        ("OlmoHybridForCausalLM", {"linear_num_key_heads": 0}, "linear_num_key_heads must be in"),
        ("Lfm2MoeForCausalLM", {"use_expert_bias": False}, "use_expert_bias false is not supported"),
        ("Lfm2MoeForCausalLM", {"num_dense_layers": -1}, "num_dense_layers must be a whole number >= 0, got -1"),
        ("GraniteForCausalLM", {"residual_multiplier": float("nan")}, "residual_multiplier must be finite"),
        ("Gemma2ForCausalLM", {"final_logit_softcapping": -1.0}, "logit_soft_cap must be a number >= 0, got -1.0"),
        ("LlamaForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 2.0}, "rope_theta": 1.0}, "theta must not"),
    ],
)
def test_impossible_values_are_refused(name, options, message):
    """Each mistake gives one line that begins with the file's name."""
    with pytest.raises(UserError) as caught:
        parse(name, **options)
    assert message in str(caught.value)
    assert str(caught.value).startswith("config.json: ")


ROPES = (
    {"type": "yarn", "factor": 2.0, "mscale": 1.0, "mscale_all_dim": 0.5, "beta_fast": 32, "beta_slow": 1},
    {"rope_type": "longrope", **FACTORS, "factor": 4.0, "attention_factor": 1.1},
)
OPTIONS = {"rope_theta": 1e4, "rope_local_base_freq": 1e4, "partial_rotary_factor": 0.5, "text_config": SIZES}
OPTIONS |= {"sliding_window": 7, "sliding_window_pattern": 2, "use_sliding_window": True}
OPTIONS |= {"layer_types": ["full_attention"] * 8, "no_rope_layers": [1] * 8, "no_rope_layer_interval": 2}
OPTIONS |= {"embedding_multiplier": 2.0, "attention_multiplier": 2.0, "logits_scaling": 2.0}


@pytest.mark.parametrize("name", [n for n in ARCHITECTURES if n not in ("GPT2LMHeadModel", "HP1ForCausalLM")])
def test_odd_values_are_refused_or_served(name):
    """config.json may hold anything: a TypeError or a hang would end a job without a word that helps."""
    whole = {"architectures": [name], **SIZES, **ARCHITECTURES[name].defaults, **OPTIONS}
    odd = [json.loads(text) for text in ODD_VALUES.values() if len(text) < 4500 and not text.startswith("10000000")]
    for key, value in itertools.product([key for key in whole if key != "architectures"], odd):
        with contextlib.suppress(UserError):
            parse_model_config({**whole, key: value}, "config.json")
    for rope, place in itertools.product(ROPES, ("rope_scaling", "rope_parameters")):
        for key, value in itertools.product(rope, odd):
            stored = {**rope, key: value}
            for nested in (stored, {"full_attention": stored}, {"sliding_attention": value}):
                with contextlib.suppress(UserError):
                    parse_model_config({**whole, place: nested}, "config.json")
