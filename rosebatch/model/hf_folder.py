"""ModelConfig -> transformers' config.json, so that other code can build the same shape with random weights."""

import json
from pathlib import Path
from typing import Any

import msgspec

from rosebatch.config.model import ModelConfig
from rosebatch.core.errors import UserError
from rosebatch.model.hf_config import parse_model_config


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


def has_config(config: ModelConfig) -> bool:
    """Whether transformers has models of this family, so that other code can build their shapes."""
    return config.family in _VALUES


def hf_values(config: ModelConfig) -> dict[str, Any]:
    """The values of that file.

    Raises:
        UserError: transformers has no architecture with these options.
    """
    if not has_config(config):
        raise UserError(f"other engines cannot run models of the family {config.family}")
    values = _VALUES[config.family](config)
    eos = list(config.eos_token_ids)
    values |= {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "torch_dtype": config.dtype,
    }
    if _plain(parse_model_config(values, "config.json")) != _plain(config):
        raise UserError(
            "no config.json can be written for a shape with these options, such as biases or windows of the family "
            f"{config.family}; give the model's transformers folder with --model"
        )
    return values


def _plain(config: ModelConfig) -> ModelConfig:
    """With a factor on q·k for every layer, which is optional; families with the delta rule have none of their own."""
    if config.delta is not None:
        return config
    scales = tuple(config.attention_scale(layer) for layer in range(config.num_layers))
    return msgspec.structs.replace(config, attention_scales=scales)


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
    rope = config.rope
    assert rope is not None, "the Llama family has rotary positions"
    scaling: dict[str, Any] | None = None
    if rope.scaling != "default":
        scaling = {"rope_type": rope.scaling, "factor": rope.factor}
    if scaling and rope.scaling == "llama3":
        names = ("low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        scaling |= {name: getattr(rope, name) for name in names}
    kind, name = ("qwen3", "Qwen3") if config.qk_norm else ("llama", "Llama")
    values = {**_decoder(config), "hidden_act": config.activation, "rope_theta": rope.theta, "rope_scaling": scaling}
    if config.experts:
        kind, name = "qwen3_moe", "Qwen3Moe"
        values |= {
            "num_experts": config.experts.num_experts,
            "num_experts_per_tok": config.experts.experts_per_token,
            "moe_intermediate_size": config.experts.expert_size,
            "norm_topk_prob": config.experts.normalize,
            "mlp_only_layers": [i for i, routed in enumerate(config.experts.layers) if not routed],
        }
    return {**values, "architectures": [f"{name}ForCausalLM"], "model_type": kind}


def _gpt_oss(config: ModelConfig) -> dict[str, Any]:
    rope, experts = config.rope, config.experts
    assert rope is not None and experts is not None, "gpt-oss has rotary positions and experts"
    scaling = {name: getattr(rope, name) for name in _YARN_FIELDS}
    return {
        **_decoder(config),
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_act": config.activation,
        "num_local_experts": experts.num_experts,
        "num_experts_per_tok": experts.experts_per_token,
        "sliding_window": max(config.sliding_windows, default=0),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in config.sliding_windows],
        "rope_theta": rope.theta,
        "rope_scaling": {"rope_type": "yarn", **scaling} if rope.scaling == "yarn" else {"rope_type": rope.scaling},
    }


def _gemma(config: ModelConfig) -> dict[str, Any]:
    """Gemma 3: full layers with linear scaling or none."""
    rope, sliding = config.rope, config.sliding_rope
    assert rope is not None, "Gemma has rotary positions"
    return {
        **_decoder(config),
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": config.activation,
        "query_pre_attn_scalar": round(config.attention_scale(0) ** -2),
        "sliding_window": max(config.sliding_windows, default=0),
        "layer_types": ["sliding_attention" if window else "full_attention" for window in config.sliding_windows],
        "final_logit_softcapping": config.logit_soft_cap or None,
        "rope_theta": rope.theta,
        "rope_local_base_freq": sliding.theta if sliding else rope.theta,
        "rope_scaling": {"rope_type": "linear", "factor": rope.factor} if rope.scaling == "linear" else None,
    }


def _phi3(config: ModelConfig) -> dict[str, Any]:
    """Phi-3 and Phi-4 without longrope, whose factors change no shape."""
    assert config.rope is not None, "Phi-3 has rotary positions"
    return {
        **_decoder(config),
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_act": config.activation,
        "original_max_position_embeddings": config.max_model_len,
        "partial_rotary_factor": config.rotary_size / config.head_dim,
        "rope_theta": config.rope.theta,
        # Its own are beyond a small vocabulary.
        "pad_token_id": 0,
        "bos_token_id": 0,
    }


def _qwen3_5(config: ModelConfig) -> dict[str, Any]:
    rope, delta = config.rope, config.delta
    assert rope is not None and delta is not None, "Qwen3.5 has rotary positions and the delta rule"
    share = config.rotary_size / config.head_dim
    return {
        **_decoder(config),
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "hidden_act": config.activation,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope.theta, "partial_rotary_factor": share},
        "layer_types": ["linear_attention" if state else "full_attention" for state in delta.layers],
        "linear_num_key_heads": delta.key_heads,
        "linear_num_value_heads": delta.value_heads,
        "linear_key_head_dim": delta.key_dim,
        "linear_value_head_dim": delta.value_dim,
        "linear_conv_kernel_dim": delta.taps,
    }


def _decoder(config: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.norm_eps,
    }


# The families that other engines have.
_YARN_FIELDS = (
    *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"),
)
_VALUES = {"gpt_oss": _gpt_oss, "gpt2": _gpt2, "llama": _llama, "gemma": _gemma, "phi3": _phi3, "qwen3_5": _qwen3_5}
