"""Starcoder 2: a plain MLP, biases, and a sliding window."""

from collections.abc import Mapping
from typing import Any

from rosebatch.model.families.layer_norm_decoder import LayerNormDecoder
from rosebatch.model.family import Architecture, Family
from rosebatch.model.hf_fields import decoder, windows
from rosebatch.model.hf_rope import whole_rope
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


ARCHITECTURES = {
    "Starcoder2ForCausalLM": Architecture("starcoder2", "StarCoder2", _parse, _DEFAULTS, window=True),
}
FAMILY = Family("starcoder2", Starcoder2, mlp_matrices=2)
