"""SmolLM3: a Llama in which some layers have no positions."""

from collections.abc import Mapping
from typing import Any

from rosebatch.host.model_files import shown
from rosebatch.model.families.llama import biases
from rosebatch.model.family import Architecture
from rosebatch.model.hf.fields import decoder, layer_types, windows
from rosebatch.model.hf.rope import whole_rope

# Defaults of transformers' config class.
_DEFAULTS = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "num_key_value_heads": 4,
    "eos_token_id": 128001,
    "pad_token_id": 128004,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
_THETA = 2_000_000.0


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; some layers have no positions, and only these may have a window."""
    fields = decoder(values, "llama") | biases(values)
    layers = fields["num_layers"]
    rotary = values.get("no_rope_layers")
    if rotary is None:
        interval = values.get("no_rope_layer_interval", 4)
        rotary = [(i + 1) % interval != 0 for i in range(layers)]
    if not isinstance(rotary, list) or any(value not in (0, 1) for value in rotary):
        raise ValueError(f"no_rope_layers must be a list of 0 and 1, got {shown(rotary)}")
    fields |= {"rope": whole_rope({"rope_theta": _THETA, **values}), "rotary_layers": [bool(r) for r in rotary]}
    if values.get("use_sliding_window") and values.get("sliding_window"):
        kinds = layer_types(values, ["full_attention" if r else "sliding_attention" for r in rotary])
        fields["sliding_windows"] = windows(values, kinds)
    return fields


ARCHITECTURES = {"SmolLM3ForCausalLM": Architecture("smollm3", "SmolLM3", _parse, _DEFAULTS, window=True)}
