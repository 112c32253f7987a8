"""Mistral: a Llama with a sliding window."""

from collections.abc import Mapping
from typing import Any

from rosebatch.model.families.llama import LLAMA_DEFAULTS
from rosebatch.model.family import Architecture
from rosebatch.model.hf.fields import decoder, windows
from rosebatch.model.hf.rope import whole_rope

# Defaults of transformers' config class.
MISTRAL_DEFAULTS = {
    **LLAMA_DEFAULTS,
    "max_position_embeddings": 4096 * 32,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
}


def parse_mistral(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``; a window in every layer."""
    fields, window = decoder(values, "llama"), values.get("sliding_window")
    sliding = windows(values, ["sliding_attention"] * fields["num_layers"]) if window else []
    return fields | {"sliding_windows": sliding, "rope": whole_rope(values)}


ARCHITECTURES = {
    "MistralForCausalLM": Architecture("mistral", "Mistral", parse_mistral, MISTRAL_DEFAULTS, window=True),
}
