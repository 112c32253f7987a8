"""Tiny random checkpoints of transformers' families, and their tokens by the fallback beside transformers' own.

Greedy tokens in fp32 on the CPU are compared with transformers' (eager attention): with whole prompts, and in chunks
with few seats and a small cache.
"""

import random
import tempfile
from pathlib import Path
from typing import Any

import torch

from rosebatch.config.run import RunConfig
from rosebatch.core.errors import UserError
from rosebatch.engine.engine import Engine
from rosebatch.model.source import find_model
from tests.helpers.reference import clear, generate
from tests.helpers.running import greedy
from tests.helpers.tiny_engines import engine_of, random_model

_VOCAB, _NEW_TOKENS = 211, 10
_CPU = torch.device("cpu")
# Values for the fields that a config has. Sizes are odd where families allow it.
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("vocab_size", "vocab_size_per_layer_input"), _VOCAB),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "dim", "word_embed_proj_dim", "embedding_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers", "decoder_layers", "encoder_layers", "n_layers"), 4),
    **dict.fromkeys(("num_attention_heads", "n_head", "decoder_attention_heads", "num_heads", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "swa_num_attention_heads", "num_global_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_global_key_value_heads", "swa_num_key_value_heads"), 2),
    **dict.fromkeys(("head_dim", "global_head_dim", "swa_head_dim", "kv_channels", "v_head_dim"), 16),
    **dict.fromkeys(("swa_v_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "rotary_dim"), 8),
    "q_lora_rank": 24,
    "kv_lora_rank": 20,
    **dict.fromkeys(("intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner"), 96),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "expert_ffn_hidden_size"), 40),
    **dict.fromkeys(("shared_intermediate_size", "ffn_hidden_size", "dff"), 48),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 6),
    **dict.fromkeys(("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"), 2),
    **dict.fromkeys(("n_group", "topk_group", "n_shared_experts", "num_shared_experts", "first_k_dense_replace"), 1),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_sequence_length"), 256),
    **dict.fromkeys(("sliding_window", "sliding_window_size", "attention_window"), 24),
    **dict.fromkeys(("hidden_size_per_layer_input", "dim_model_base"), 8),
    "initializer_range": 0.2,
    "layer_types": None,
    "mlp_layer_types": None,
    **dict.fromkeys(("eos_token_id", "bos_token_id", "pad_token_id"), 1),
}


def tiny_config(model_type: str) -> Any:
    """The config of a family with every size small; also those of its parts."""
    from transformers import AutoConfig

    return AutoConfig.for_model(model_type, **_small(AutoConfig.for_model(model_type)))


def _small(config: Any) -> dict[str, Any]:
    """Values in place of a config's own."""
    from transformers import PreTrainedConfig

    own = config.to_dict()
    values = {name: value for name, value in _SIZES.items() if name in own}
    if "kv_lora_rank" in own:
        # A head of keys for each of queries; the size of a head is that of its rotated part.
        values |= {"num_key_value_heads": _SIZES["num_attention_heads"], "head_dim": _SIZES["qk_rope_head_dim"]}
    if isinstance(own.get("layer_types"), list):
        kinds = list(dict.fromkeys(own["layer_types"]))
        values["layer_types"] = [kinds[i % len(kinds)] for i in range(4)]
    if isinstance(own.get("mlp_layer_types"), list):
        values["mlp_layer_types"] = ["dense", "sparse", "sparse", "sparse"]
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            values[name] = {**_small(value), "model_type": value.model_type}
    return values


def save_tiny_model(config: Any, folder: Path) -> Any:
    """Save a random model and return it; norms and biases are random too, or a model could ignore them."""
    model = random_model(config, attn_implementation="eager")
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


def engine_of_fallback(folder: Path, device: str = "cpu", **limits: int) -> Engine:
    """An engine on a folder, by transformers' code. See ``engine_of``."""
    return engine_of(folder, device=device, model_impl="transformers", **limits)


def make_prompts() -> list[list[int]]:
    """Prompts of 1 to 70 tokens, some of which begin alike."""
    numbers = random.Random(0)
    shared = [numbers.randrange(5, _VOCAB) for _ in range(40)]
    return [
        shared[: length // 2] + [numbers.randrange(5, _VOCAB) for _ in range(length - length // 2)]
        for length in (1, 5, 17, 33, 50, 61, 70, 24)
    ]


def try_family(model_type: str, prompts: list[list[int]] | None = None) -> tuple[str, str]:
    """``served``, ``refused``, ``wrong`` or ``untried``, and why."""
    prompts = prompts or make_prompts()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            config = tiny_config(model_type)
            expected = clear(*generate(save_tiny_model(config, folder), prompts, _NEW_TOKENS))
        except Exception as error:
            try:
                find_model(RunConfig(model=str(folder), dtype="float32", model_impl="transformers"), _CPU)
            except UserError as refused:
                if "not supported" in str(refused):
                    return "refused", str(refused).partition("not supported: ")[2]
            return "untried", f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        try:
            whole, small = (
                greedy(engine_of_fallback(folder, block_size=4, **limits), prompts, _NEW_TOKENS)
                for limits in (
                    {"max_num_seqs": 64, "max_num_batched_tokens": 8192, "blocks": 1000},
                    {"max_num_seqs": 3, "max_num_batched_tokens": 7, "blocks": 30},
                )
            )
        except UserError as error:
            return "refused", str(error).partition("not supported: ")[2] or str(error)
        if not expected:
            return "untried", "every prompt is decided by rounding"
        for label, found in (("whole", whole), ("in chunks", small)):
            wrong = [number for number, tokens in expected.items() if found[number] != tokens]
            if wrong:
                return "wrong", f"{label}: {len(wrong)} of {len(expected)} prompts"
        return "served", f"{len(expected)} prompts"
