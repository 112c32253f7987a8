"""ModelConfig -> transformers' config.json, so that other code can build the same shape with random weights."""

import json
from pathlib import Path
from typing import Any

from rosebatch.config import ModelConfig
from rosebatch.errors import UserError


def write_config(config: ModelConfig, folder: Path) -> None:
    """Write ``folder/config.json``. ``rosebatch.model.hf_config`` reads the same shape back from it.

    Raises:
        UserError: transformers has no architecture with these options.
    """
    try:
        values = hf_values(config)
    except UserError as error:
        raise UserError(f"--against: {error}") from None
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def hf_values(config: ModelConfig) -> dict[str, Any]:
    """The values of that file.

    Raises:
        UserError: transformers has no architecture with these options.
    """
    if config.family not in _VALUES:
        raise UserError(f"other engines cannot run models of the family {config.family}")
    values = _VALUES[config.family](config)
    eos = list(config.eos_token_ids)
    values |= {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "torch_dtype": config.dtype,
    }
    return values


def _gpt2(config: ModelConfig) -> dict[str, Any]:
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_embd": config.hidden_size,
        "n_layer": config.num_layers,
        "n_head": config.num_heads,
        "n_inner": config.intermediate_size,
        "n_positions": config.max_model_len,
        "layer_norm_epsilon": config.norm_eps,
        "activation_function": config.activation,
    }


def _llama(config: ModelConfig) -> dict[str, Any]:
    if config.qkv_bias or config.out_bias or config.mlp_bias or config.sliding_windows or config.attention_scales:
        raise UserError(
            "no config.json can be written for a shape with biases, windows or attention scales; "
            "give the model's transformers folder with --model"
        )
    rope = config.rope
    assert rope is not None, "the Llama family has rotary positions"
    scaling: dict[str, Any] | None = None
    if rope.scaling != "default":
        scaling = {"rope_type": rope.scaling, "factor": rope.factor}
    if scaling and rope.scaling == "llama3":
        names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        scaling |= {name: getattr(rope, name) for name in names}
    return {
        "architectures": ["Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLM"],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": config.activation,
        "rope_theta": rope.theta,
        "rope_scaling": scaling,
    }


# The families that other engines have.
_VALUES = {"gpt2": _gpt2, "llama": _llama}
