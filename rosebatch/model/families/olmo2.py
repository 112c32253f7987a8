"""OLMo 2 and 3: norms after each sub-layer and none before; one norm over all of q, and one over all of k."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rosebatch.model.families.llama import Llama
from rosebatch.model.family import GGUF, Architecture, Family
from rosebatch.model.gguf import decoder as gguf_decoder
from rosebatch.model.hf.fields import attention_biases, decoder, every, layer_types, windows
from rosebatch.model.hf.rope import ropes_by_type, whole_rope
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import WholeRMSNorm


class Olmo2(Llama):
    """See ``Llama``."""

    input_norm_name = None
    post_attention_norm_name = "post_attention_layernorm"
    mlp_norm_name = None
    post_mlp_norm_name = "post_feedforward_layernorm"

    def load_norm(self, name: str, size: int, weights: WeightSource) -> Tensor:
        """In fp32: only the normed result is rounded."""
        return weights.get(f"{name}.weight", (size,), dtype=torch.float32, fill=1.0)

    def load_qk_norm(self, prefix: str, weights: WeightSource) -> WholeRMSNorm:
        """See ``Llama``."""
        c, shard = self.config, self.ops.shard

        def load(name: str, heads: int, own: range) -> Tensor:
            weight = self.load_norm(f"{prefix}self_attn.{name}_norm", heads * c.head_dim, weights)
            return weight[own.start * c.head_dim : own.stop * c.head_dim].contiguous()

        q_weight = load("q", c.num_heads, shard.of(c.num_heads))
        k_weight = load("k", c.num_kv_heads, shard.kv_heads(c.num_kv_heads))
        return WholeRMSNorm(q_weight, k_weight, c.norm_eps)


# Defaults of transformers' config classes.
_OLMO2_DEFAULTS = {
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 50279,
    "pad_token_id": 1,
    "hidden_act": "silu",
}
_OLMO3_DEFAULTS = {**_OLMO2_DEFAULTS, "sliding_window": 4096}
_OLMO3_THETA = 500_000.0


def _parse_olmo2(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    return _shared(values) | {"rope": whole_rope(values)}


def _parse_olmo3(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; three of four layers have a window and positions without scaling."""
    fields = _shared(values)
    full, sliding = ropes_by_type(values, theta=_OLMO3_THETA, sliding_theta=values.get("rope_theta") or _OLMO3_THETA)
    kinds = layer_types(values, every(4, fields["num_layers"]))
    return fields | {"sliding_windows": windows(values, kinds), "rope": full, "sliding_rope": sliding}


def _shared(values: Mapping[str, Any]) -> dict[str, Any]:
    return decoder(values, "olmo2") | attention_biases(values) | {"qk_norm": True}


_GGUF_LAYER_NAMES = {
    **gguf_decoder.ATTENTION,
    **gguf_decoder.MLP,
    **gguf_decoder.HEAD_NORMS,
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# OLMo 3's files have this name too; their windows are refused by the key.
_GGUF = GGUF("olmo2", "model.layers", gguf_decoder.NAMES, _GGUF_LAYER_NAMES, gguf_decoder.decoder)
ARCHITECTURES = {
    "Olmo2ForCausalLM": Architecture("olmo2", "OLMo 2", _parse_olmo2, _OLMO2_DEFAULTS, gguf=(_GGUF,)),
    "Olmo3ForCausalLM": Architecture("olmo3", "OLMo 3", _parse_olmo3, _OLMO3_DEFAULTS, window=True),
}
FAMILY = Family("olmo2", Olmo2)
