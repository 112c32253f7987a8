"""Greedy tokens of the transformers fallback in fp32 equal transformers' own, whole and in chunks with few seats."""

import pytest

from tests.helpers.against import assert_same
from tests.helpers.tiny_families import make_prompts, save_tiny_model, try_family

# Dense, soft caps and windows, sinks and experts, windows that only masks tell, learned positions, values that are
# narrower than keys.
FAST = ["gemma2", "opt", "deepseek_v3"]
THOROUGH = [
    *("llama", "gpt_oss", "phimoe"),
    *("afmoe", "apertus", "arcee", "biogpt", "bitnet", "cohere2", "cohere2_moe", "ctrl", "diffllama", "dots1"),
    *("ernie4_5_moe", "exaone4", "glm4_moe", "gpt_bigcode", "granitemoeshared", "helium", "hunyuan_v1_dense", "jais2"),
    *("minicpm3", "modernbert-decoder", "nemotron", "olmoe", "persimmon", "qwen3_moe", "seed_oss", "smollm3"),
]


@pytest.mark.whole
@pytest.mark.parametrize("model_type", ["aria", pytest.param("qianfan_ocr", marks=pytest.mark.thorough)])
def test_tokens_of_a_model_that_sees(model_type, transformers):
    """transformers has no class for its text alone, for which alone was looked: it was refused."""
    assert try_family(model_type, make_prompts()[::2])[0] == "served"


@pytest.mark.parametrize("model_type", [*FAST, *(pytest.param(each, marks=pytest.mark.thorough) for each in THOROUGH)])
def test_tokens_of_a_family(model_type, transformers):
    """A wrong window, scale, cap, sink, position or fused part changes tokens; so would one that a schedule reaches.

    Each family has something that the others lack.
    """
    assert try_family(model_type, make_prompts()[::2])[0] == "served"


# Gemma 4 E2B and E4B in small.
_SHARING = {
    "vocab_size": 211,
    "vocab_size_per_layer_input": 211,
    "hidden_size_per_layer_input": 8,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 24,
    "sliding_window": 7,
    "num_hidden_layers": 6,
    "max_position_embeddings": 256,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "use_double_wide_mlp": True,
    **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"), 1),
}


@pytest.mark.whole
@pytest.mark.parametrize(
    ("kind", "shared"),
    [("text", 3), *(pytest.param(k, n, marks=pytest.mark.thorough) for k in ("text", "whole") for n in (1, 2))],
)
def test_layers_that_share_keys(kind, shared, tmp_path, transformers):
    """Such layers get a slice of a mask, which had lost its window: Gemma 4 E2B and E4B were refused."""
    values = {**_SHARING, "num_kv_shared_layers": shared, "initializer_range": 0.2}
    config = transformers.AutoConfig.for_model("gemma4_text", **values)
    if kind == "whole":
        config = transformers.Gemma4Config(text_config=config, vision_config=None, audio_config=None)
    assert_same(save_tiny_model(config, tmp_path), tmp_path)
