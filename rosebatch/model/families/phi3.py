"""Phi-3, Phi-4 and Phi-4-mini: a Llama whose checkpoints hold q, k and v as one tensor, and gate and up as another."""

from collections.abc import Mapping
from typing import Any

from rosebatch.config.model import ModelConfig
from rosebatch.model.families.llama import Llama
from rosebatch.model.family import GGUF, Architecture, Family, GGUFModel
from rosebatch.model.gguf import decoder as gguf_decoder
from rosebatch.model.hf.fields import decoder, decoder_values, windows
from rosebatch.model.hf.rope import rope, rotary_dim, rotary_share


class Phi3(Llama):
    """See ``Llama``."""

    qkv_names = ("self_attn.qkv_proj",)
    gate_up_names = ("mlp.gate_up_proj",)


# Defaults of transformers' config class.
_DEFAULTS = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 32000,
    "pad_token_id": 32000,
    "hidden_act": "silu",
}
# Former names of longrope.
_LONGROPE = ("su", "yarn")


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    fields = decoder(values, "phi3")
    values = {**values}
    for name in ("rope_scaling", "rope_parameters"):
        stored = values.get(name)
        if isinstance(stored, dict) and (stored.get("rope_type") or stored.get("type")) in _LONGROPE:
            values[name] = {**stored, "rope_type": "longrope"}
    window = values.get("sliding_window")
    if isinstance(window, int) and window >= fields["max_model_len"]:
        # Phi-4-mini's: it hides no key, and layers without a window are faster.
        window = None
    return fields | {
        "sliding_windows": windows(values, ["sliding_attention"] * fields["num_layers"]) if window else [],
        "rope": rope(values),
        "rotary_dim": rotary_dim(fields["head_dim"], rotary_share(values, 1.0)),
    }


def _hf_values(config: ModelConfig) -> dict[str, Any]:
    """Phi-3 and Phi-4 without longrope, whose factors change no shape."""
    assert config.rope is not None, "Phi-3 has rotary positions"
    return {
        **decoder_values(config),
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


_GGUF_LAYER_NAMES = {
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
    **gguf_decoder.NORMS,
}


def _gguf_config(model: GGUFModel) -> dict[str, Any]:
    """The files name no scaling of positions: they have its factors or not."""
    unnamed = "longrope" if "rope_factors_long.weight" in model.names else "linear"
    fields = gguf_decoder.decoder(model, partial=True, unnamed=unnamed)
    length = fields["max_position_embeddings"]
    return fields | {
        "sliding_window": model.get("attention.sliding_window", 0) or None,
        "original_max_position_embeddings": model.get("rope.scaling.original_context_length", length),
    }


_GGUF = GGUF("phi3", "model.layers", gguf_decoder.NAMES, _GGUF_LAYER_NAMES, _gguf_config, pieces="phi")
ARCHITECTURES = {
    "Phi3ForCausalLM": Architecture("phi3", "Phi-3, Phi-4, Phi-4-mini", _parse, _DEFAULTS, window=True, gguf=(_GGUF,)),
}
FAMILY = Family("phi3", Phi3, hf_values=_hf_values)
