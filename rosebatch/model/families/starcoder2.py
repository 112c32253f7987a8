"""Starcoder 2: a plain MLP, biases, and a sliding window."""

from collections.abc import Mapping
from typing import Any

from rosebatch.model.families.layer_norm_decoder import LayerNormDecoder
from rosebatch.model.family import GGUF, Architecture, Family, GGUFModel
from rosebatch.model.gguf import decoder as gguf_decoder
from rosebatch.model.hf.fields import decoder, windows
from rosebatch.model.hf.rope import whole_rope
from rosebatch.model.sublayers import MLP, load_plain_mlp
from rosebatch.model.weights import WeightSource
from rosebatch.ops.ops import ACTIVATIONS


class Starcoder2(LayerNormDecoder):
    """See ``LayerNormDecoder``."""

    def load_mlp(self, prefix: str, weights: WeightSource) -> MLP:
        """See ``LayerNormDecoder``."""
        return load_plain_mlp(self.config, self.ops, weights, f"{prefix}mlp.c_fc", f"{prefix}mlp.c_proj")


# Defaults of transformers' config class.
_DEFAULTS = {
    "max_position_embeddings": 4096,
    "norm_epsilon": 1e-5,
    "num_key_value_heads": 2,
    "eos_token_id": 50256,
    "hidden_act": "gelu_pytorch_tanh",
    "use_bias": True,
    "tie_word_embeddings": True,
}


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    fields = decoder(values, "starcoder2", eps="norm_epsilon", activations=ACTIVATIONS)
    bias, window = values["use_bias"], values.get("sliding_window")
    return fields | {
        "qkv_bias": bias,
        "out_bias": bias,
        "mlp_bias": bias,
        "sliding_windows": windows(values, ["sliding_attention"] * fields["num_layers"]) if window else [],
        "rope": whole_rope(values),
    }


_GGUF_LAYER_NAMES = {
    **gguf_decoder.ATTENTION,
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
    **gguf_decoder.NORMS,
}


def _gguf_config(model: GGUFModel) -> dict[str, Any]:
    """llama.cpp's converter writes no window."""
    return gguf_decoder.decoder(model, layer_norm="norm_epsilon") | {
        "use_bias": gguf_decoder.has(model, "attn_q.bias"),
        "sliding_window": model.get("attention.sliding_window", 0) or None,
    }


def _gguf_biases(config: Mapping[str, Any]) -> tuple[str, ...]:
    return (*gguf_decoder.NORMS, "output_norm", *(_GGUF_LAYER_NAMES if config["use_bias"] else ()))


_GGUF = GGUF("starcoder2", "model.layers", gguf_decoder.NAMES, _GGUF_LAYER_NAMES, _gguf_config, biases=_gguf_biases)
ARCHITECTURES = {
    "Starcoder2ForCausalLM": Architecture("starcoder2", "StarCoder2", _parse, _DEFAULTS, window=True, gguf=(_GGUF,)),
}
FAMILY = Family("starcoder2", Starcoder2, mlp_matrices=2)
