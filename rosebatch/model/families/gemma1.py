"""Gemma 1: Gemma 2 without windows, soft caps and the norms after each sub-layer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rosebatch.model.families.gemma import GGUF_GEMMA2, Gemma
from rosebatch.model.family import Architecture, Family
from rosebatch.model.gguf import decoder as gguf_decoder
from rosebatch.model.hf.fields import attention_biases, decoder, refuse
from rosebatch.model.hf.rope import whole_rope


class Gemma1(Gemma):
    """See ``Gemma``."""

    post_attention_norm_name = None
    mlp_norm_name = "post_attention_layernorm"
    post_mlp_norm_name = None


# Defaults of transformers' config class.
_DEFAULTS = {
    "vocab_size": 256_000,
    "hidden_size": 3072,
    "intermediate_size": 24_576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    refuse(values, "use_bidirectional_attention")
    if values["hidden_act"] == "gelu":
        # The first checkpoints say so, and mean the other one.
        values = {**values, "hidden_act": "gelu_pytorch_tanh"}
    fields = decoder(values, "gemma1")
    own = {"rope": whole_rope(values), "embedding_multiplier": fields["hidden_size"] ** 0.5}
    return fields | attention_biases(values) | own


_GGUF = replace(
    GGUF_GEMMA2,
    architecture="gemma",
    layer_names={**gguf_decoder.ATTENTION, **gguf_decoder.MLP, **gguf_decoder.NORMS},
    config=gguf_decoder.decoder,
)
ARCHITECTURES = {"GemmaForCausalLM": Architecture("gemma", "Gemma", _parse, _DEFAULTS, gguf=(_GGUF,))}
FAMILY = Family("gemma1", Gemma1)
