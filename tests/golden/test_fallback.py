"""Greedy tokens of the transformers fallback in fp32 equal transformers' own, whole and in chunks with few seats."""

import pytest

from tests.helpers.tiny_families import make_prompts, try_family

# Dense, soft caps and windows, sinks and experts, windows that only masks tell, learned positions, values that are
# narrower than keys.
FAST = ["llama", "gemma2", "gpt_oss", "phimoe", "opt", "deepseek_v3"]
THOROUGH = [
    *("afmoe", "apertus", "arcee", "biogpt", "bitnet", "cohere2", "cohere2_moe", "ctrl", "diffllama", "dots1"),
    *("ernie4_5_moe", "exaone4", "glm4_moe", "gpt_bigcode", "granitemoeshared", "helium", "hunyuan_v1_dense", "jais2"),
    *("minicpm3", "modernbert-decoder", "nemotron", "olmoe", "persimmon", "qwen3_moe", "seed_oss", "smollm3"),
]


@pytest.mark.whole
@pytest.mark.parametrize("model_type", FAST)
def test_tokens_of_a_family(model_type, transformers):
    """A wrong window, scale, cap, sink, position or fused part changes tokens; so would one that a schedule reaches."""
    assert try_family(model_type, make_prompts()[::2])[0] == "served"


@pytest.mark.thorough
@pytest.mark.parametrize("model_type", THOROUGH)
def test_tokens_of_a_further_family(model_type, transformers):
    """The same; each has something that the others lack."""
    assert try_family(model_type)[0] == "served"
