"""Greedy tokens in fp32 equal transformers' own for every family that rosebatch has beside the first ones."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers.families import FAMILIES, VARIANTS

_WITH_WINDOWS = ["gemma2", "olmo3", "smollm3", "cohere2", "gemma3-pattern", "phi3-window"]
# One for each kind of layer.
_FAST = {"gemma3", "gpt_oss", "qwen3_moe", "qwen3_next", "phi3-longrope", "olmo2", "cohere", "gpt_neox"}
CASES = [pytest.param(name, marks=() if name in _FAST else pytest.mark.thorough) for name in [*FAMILIES, *VARIANTS]]


@pytest.mark.whole
@pytest.mark.parametrize("name", CASES)
def test_whole_prompts_and_chunks_with_few_seats(name, goldens, make_engine, greedy_tokens):
    """A wrong name, norm, multiplier, order or table changes tokens; so would one that the schedule can reach."""
    golden = goldens(name)
    engine = make_engine(golden.folder, chunked_prefill=False, prefix_cache=False)
    assert greedy_tokens(engine, golden.prompts) == golden.expected
    engine = make_engine(golden.folder, seqs=3, chunk=16, block_size=4, blocks=40)
    assert greedy_tokens(engine, golden.prompts[:8]) == golden.expected[:8]
    assert engine.stats.max_running == 3


# Layers with and without a window; sinks as well; windows alone.
WINDOWS = ["gemma3", "gpt_oss", "starcoder2", *(pytest.param(n, marks=pytest.mark.thorough) for n in _WITH_WINDOWS)]


@pytest.mark.whole
@pytest.mark.parametrize("name", WINDOWS)
def test_tiny_caches_of_models_with_windows(name, goldens, make_engine, greedy_tokens):
    """Blocks that left a window are another's at once: reading one too far back, or freeing one too early, shows."""
    golden = goldens(name)
    longest = max(map(len, golden.prompts)) + len(golden.expected[0])
    blocks = -(-longest // 4) + 2
    engine = make_engine(golden.folder, seqs=6, chunk=24, block_size=4, blocks=blocks - 2)
    # With drafts, rows end before one takes blocks from another.
    engine.drafter = None
    assert greedy_tokens(engine, golden.prompts[:16]) == golden.expected[:16]
    assert engine.stats.preemptions > 0
    # A longest sequence alone: its windows' blocks are few, and the memory that they leave is of full attention.
    engine = make_engine(golden.folder, seqs=1, chunk=12, block_size=4, blocks=blocks)
    chosen = sorted(range(len(golden.prompts)), key=lambda i: len(golden.prompts[i]))[-2:]
    assert greedy_tokens(engine, [golden.prompts[i] for i in chosen]) == [golden.expected[i] for i in chosen]


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model.", "model.text_model."])
def test_the_text_part_of_a_model_with_images(prefix, goldens, tmp_path, make_engine, greedy_tokens):
    """Versions of transformers name the tensors of the text part in several ways; the other parts are not read."""
    golden = goldens("gemma3")
    text = json.loads((golden.folder / "config.json").read_text())
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps({**outer, "text_config": text}))
    tensors = load_file(golden.folder / "model.safetensors")
    tensors = {name.replace("model.", prefix, 1): tensor for name, tensor in tensors.items()}
    save_file({**tensors, "vision_tower.weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    assert greedy_tokens(make_engine(tmp_path), golden.prompts[:8]) == golden.expected[:8]


def test_gpt_neox_of_transformers_4(goldens, tmp_path, make_engine, greedy_tokens):
    """It called the head embed_out, and wrote the base and share of the rotation by names of the family's own."""
    golden = goldens("gpt_neox")
    config = json.loads((golden.folder / "config.json").read_text())
    del config["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps({**config, "rotary_emb_base": 10000, "rotary_pct": 0.25}))
    tensors = load_file(golden.folder / "model.safetensors")
    head = "lm_head.weight" if "lm_head.weight" in tensors else "embed_out.weight"
    tensors["embed_out.weight"] = tensors.pop(head)
    save_file(tensors, tmp_path / "model.safetensors")
    assert greedy_tokens(make_engine(tmp_path), golden.prompts[:8]) == golden.expected[:8]
