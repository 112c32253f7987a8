"""Qwen3.5: Qwen3-Next with other names of projections."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.model.families.qwen import GGUF_EXPERTS, GGUF_SHARED, qwen_experts
from rosebatch.model.families.qwen3_next import DELTA_DEFAULTS, DELTA_LACKS, Qwen3Next, gguf_config, parse_delta
from rosebatch.model.family import GGUF, Architecture, Family
from rosebatch.model.gguf import decoder as gguf_decoder
from rosebatch.model.gguf import gated_delta as gguf_delta
from rosebatch.model.hf.fields import decoder_values


class Qwen35(Qwen3Next):
    """See ``Qwen3Next``: its checkpoints have the projections apart."""

    delta_names = (
        "linear_attn.in_proj_qkv",
        "linear_attn.in_proj_z",
        "linear_attn.in_proj_b",
        "linear_attn.in_proj_a",
    )

    def delta_sizes(self) -> tuple[int, ...]:
        """See ``Qwen3Next``."""
        delta = self.config.delta
        assert delta is not None
        return delta.channels, delta.value_heads * delta.value_dim, delta.value_heads, delta.value_heads

    def delta_order(self) -> Tensor | None:
        """See ``Qwen3Next``."""
        return None


# Defaults of transformers' config classes.
_DEFAULTS = {**DELTA_DEFAULTS, "num_key_value_heads": 4}
_MOE_DEFAULTS = {
    **DELTA_DEFAULTS,
    "num_key_value_heads": 2,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
}


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``. Positions of text are equal in all three parts of its rotary positions."""
    return parse_delta(values, "qwen3_5")


def _parse_moe(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; experts in every layer."""
    # No layer has a dense MLP.
    fields = parse_delta({**values, "intermediate_size": values["moe_intermediate_size"]}, "qwen3_5")
    return fields | {"experts": qwen_experts(values, fields["num_layers"], shared=True)}


def _hf_values(config: ModelConfig) -> dict[str, Any]:
    rope, delta = config.rope, config.delta
    assert rope is not None and delta is not None, "Qwen3.5 has rotary positions and the delta rule"
    share = config.rotary_size / config.head_dim
    return {
        **decoder_values(config),
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


_GGUF = GGUF(
    "qwen35",
    "model.layers",
    gguf_decoder.NAMES,
    {**gguf_delta.APART, **gguf_decoder.MLP},
    gguf_delta.config,
    absent=gguf_delta.absent,
    bare=gguf_delta.BARE,
    values=gguf_delta.apart,
)
_GGUF_MOE = replace(
    _GGUF,
    architecture="qwen35moe",
    layer_names={**gguf_delta.APART, **GGUF_EXPERTS, **GGUF_SHARED},
    config=gguf_config,
)
ARCHITECTURES = {
    "Qwen3_5ForCausalLM": Architecture("qwen3_5_text", "Qwen3.5", _parse, _DEFAULTS, fallback=False, gguf=(_GGUF,)),
    "Qwen3_5MoeForCausalLM": Architecture(
        "qwen3_5_moe_text",
        "Qwen3.5 with experts",
        _parse_moe,
        _MOE_DEFAULTS,
        experts=True,
        fallback=False,
        gguf=(_GGUF_MOE,),
    ),
}
FAMILY = Family(
    "qwen3_5",
    Qwen35,
    attention_matrices=3,
    needs={"delta": "the delta rule"},
    may_have=("experts",),
    lacks=DELTA_LACKS,
    hf_values=_hf_values,
)
