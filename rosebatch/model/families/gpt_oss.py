"""gpt-oss: experts with biases and a clamped activation, attention with sinks, windows in every other layer.

Checkpoints hold an expert's matrices in 16 bits, ``[E, in, out]``, or in MXFP4.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.model.experts import ExpertsMLP, make_router
from rosebatch.model.families.llama import Llama
from rosebatch.model.family import GGUF, Architecture, Family, GGUFModel
from rosebatch.model.gguf import decoder as gguf_decoder
from rosebatch.model.hf.fields import (
    UnservedError,
    attention_biases,
    decoder,
    decoder_values,
    layer_types,
    local_experts,
    supported,
    windows,
)
from rosebatch.model.hf.rope import whole_rope
from rosebatch.model.quantization.forms import load_matrix, load_weight
from rosebatch.model.rope import Rotary
from rosebatch.model.sublayers import Mixer
from rosebatch.model.weights import WeightSource, lazy_tensor
from rosebatch.ops.ops import Experts


class GptOss(Llama):
    """See ``Llama``."""

    def load_mixer(self, index: int, prefix: str, rotary: Rotary | None, weights: WeightSource) -> Mixer:
        """See ``Llama``."""
        sinks = self._load_sinks(prefix, weights)
        return self.load_paged_attention(index, prefix, weights, rotary=rotary, qk_norm=None, sinks=sinks)

    def _load_sinks(self, prefix: str, weights: WeightSource) -> Tensor:
        heads = self.ops.shard.of(self.config.num_heads)
        sinks = weights.get(f"{prefix}self_attn.sinks", (self.config.num_heads,))
        return sinks[heads.start : heads.stop].contiguous()

    def load_experts(self, prefix: str, weights: WeightSource) -> ExpertsMLP:
        """See ``Llama``."""
        config, own = self.config.experts, f"{prefix}mlp."
        assert config is not None
        count, inner, hidden = config.num_experts, config.expert_size, self.config.hidden_size
        part = self.ops.shard.of(inner)
        # Checkpoints hold gate and up rows in turn.
        gate = np.arange(2 * part.start, 2 * part.stop, 2)
        apart = np.concatenate([gate, gate + 1])
        gate_up = load_matrix(weights, f"{own}experts.gate_up_proj", (count, 2 * inner, hidden), transposed=True)
        gate_up_bias = lazy_tensor(weights, f"{own}experts.gate_up_proj_bias", (count, 2 * inner)).take(1, apart)
        down = load_matrix(weights, f"{own}experts.down_proj", (count, hidden, inner), transposed=True)
        down_bias = weights.get(f"{own}experts.down_proj_bias", (count, hidden))
        if self.ops.shard.rank > 0:
            # The sum over all processes has it once.
            down_bias = torch.zeros_like(down_bias)
        routed = Experts(
            gate_up=gate_up.rows(apart),
            down=down.columns(part),
            gate_up_bias=gate_up_bias.read(),
            down_bias=down_bias,
            activation="clamped_swiglu",
            k=config.experts_per_token,
            normalize=config.normalize,
        )
        router = load_weight(weights, f"{own}router.weight", (count, hidden))
        bias = weights.get(f"{own}router.bias", (count,))
        return ExpertsMLP(make_router(self.ops, router, bias), count, self.ops.experts(routed))


# Defaults of transformers' config class.
_DEFAULTS = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "head_dim": 64,
    "num_key_value_heads": 8,
    "hidden_act": "silu",
    "attention_bias": True,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    # Checkpoints in MXFP4 leave it out.
    "torch_dtype": "bfloat16",
}
_THETA = 150000.0
_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_YARN_FIELDS = (
    *("factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "truncate"),
)
# Constants of the activation, which the kernels have.
_CONSTANTS = {"swiglu_alpha": 1.702, "swiglu_limit": 7.0}


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    for name, served in _CONSTANTS.items():
        if values.get(name, served) != served:
            raise UnservedError(f"{name} other than {served} is not supported")
    supported("hidden_act", values["hidden_act"], ("silu",))
    if not (values.get("rope_parameters") or values.get("rope_scaling")):
        values = {**values, "rope_scaling": _YARN}
    fields = decoder(values, "gpt_oss")
    layers = fields["num_layers"]
    default = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    return fields | {
        **attention_biases(values),
        "rope": whole_rope({"rope_theta": _THETA, **values}),
        "sliding_windows": windows(values, layer_types(values, default)),
        "experts": local_experts(values, layers),
    }


def _hf_values(config: ModelConfig) -> dict[str, Any]:
    rope, experts = config.rope, config.experts
    assert rope is not None and experts is not None, "gpt-oss has rotary positions and experts"
    scaling = {name: getattr(rope, name) for name in _YARN_FIELDS}
    return {
        **decoder_values(config),
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


_GGUF_LAYER_NAMES = {
    **gguf_decoder.ATTENTION,
    "attn_sinks.weight": "self_attn.sinks",
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router",
    "ffn_gate_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_up_exps.weight": "mlp.experts.gate_up_proj",
    "ffn_down_exps.weight": "mlp.experts.down_proj",
    "ffn_gate_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_up_exps.bias": "mlp.experts.gate_up_proj_bias",
    "ffn_down_exps.bias": "mlp.experts.down_proj_bias",
}


def _gguf_config(model: GGUFModel) -> dict[str, Any]:
    """The slopes of YaRN are not cut to whole channels; the file does not say so."""
    fields = gguf_decoder.decoder(model)
    return fields | {
        "rope_parameters": {**fields["rope_parameters"], "truncate": False},
        "intermediate_size": model.get("expert_feed_forward_length", fields["intermediate_size"]),
        "num_local_experts": model.need("expert_count"),
        "num_experts_per_tok": model.need("expert_used_count"),
        "sliding_window": model.need("attention.sliding_window"),
        "layer_types": gguf_decoder.layer_types(model, 2),
        "attention_bias": True,
    }


def _gguf_values(name: str, values: NDArray[np.float32], _: Mapping[str, Any]) -> NDArray[np.float32]:
    """transformers stores experts as ``[E, in, out]``."""
    return values.swapaxes(1, 2) if name.endswith(("gate_up_proj", "down_proj")) else values


_GGUF = GGUF(
    "gpt-oss",
    "model.layers",
    gguf_decoder.NAMES,
    _GGUF_LAYER_NAMES,
    _gguf_config,
    biases=lambda _: (*gguf_decoder.ATTENTION, "ffn_gate_inp"),
    values=_gguf_values,
    # Gate and up in turn.
    join=lambda parts: torch.stack(parts, -1).flatten(-2),
    mxfp4=lambda parts: np.stack(parts, 2).reshape(len(parts[0]), -1, *parts[0].shape[2:]),
)
ARCHITECTURES = {
    "GptOssForCausalLM": Architecture(
        "gpt_oss", "gpt-oss", _parse, _DEFAULTS, window=True, experts=True, gguf=(_GGUF,)
    ),
}
FAMILY = Family("gpt_oss", GptOss, needs={"experts": "routed experts"}, hf_values=_hf_values)
