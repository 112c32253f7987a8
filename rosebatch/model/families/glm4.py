"""GLM-4 (0414): norms before and after each sub-layer; rotary positions turn neighbouring channels."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from rosebatch.model.families.llama import Llama
from rosebatch.model.family import GGUF, Architecture, Family, GGUFModel
from rosebatch.model.gguf import decoder as gguf_decoder
from rosebatch.model.hf.fields import decoder
from rosebatch.model.hf.rope import rope, rotary_dim, rotary_share
from rosebatch.model.rope import interleaved_qkv_order


class Glm4(Llama):
    """See ``Llama``."""

    gate_up_names = ("mlp.gate_up_proj",)
    post_attention_norm_name = "post_self_attn_layernorm"
    mlp_norm_name = "post_attention_layernorm"
    post_mlp_norm_name = "post_mlp_layernorm"

    def qkv_order(self) -> Tensor:
        """See ``interleaved_qkv_order``."""
        return interleaved_qkv_order(self.config)


# Defaults of transformers' config class.
_DEFAULTS = {
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1.5625e-07,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "eos_token_id": [151329, 151336, 151338],
    "pad_token_id": 151329,
    "attention_bias": True,
    "hidden_act": "silu",
}


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    fields = decoder(values, "glm4")
    return fields | {
        "qkv_bias": values["attention_bias"],
        "rope": rope(values),
        "rotary_dim": rotary_dim(fields["head_dim"], rotary_share(values, 0.5)),
    }


_GGUF_LAYER_NAMES = {
    **gguf_decoder.ATTENTION,
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
    **gguf_decoder.NORMS,
    "post_attention_norm": "post_self_attn_layernorm",
    "post_ffw_norm": "post_mlp_layernorm",
}


def _gguf_config(model: GGUFModel) -> dict[str, Any]:
    return gguf_decoder.decoder(model, partial=True) | {"attention_bias": gguf_decoder.has(model, "attn_q.bias")}


_GGUF = GGUF(
    "glm4",
    "model.layers",
    gguf_decoder.NAMES,
    _GGUF_LAYER_NAMES,
    _gguf_config,
    biases=lambda config: gguf_decoder.QKV if config["attention_bias"] else (),
)
ARCHITECTURES = {"Glm4ForCausalLM": Architecture("glm4", "GLM-4-0414", _parse, _DEFAULTS, gguf=(_GGUF,))}
FAMILY = Family("glm4", Glm4)
