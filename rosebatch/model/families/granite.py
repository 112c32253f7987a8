"""Granite 3.x: a Llama with multipliers in four places."""

from collections.abc import Mapping
from typing import Any

from rosebatch.model.families.llama import LLAMA_DEFAULTS, parse_llama
from rosebatch.model.family import Architecture


def _parse(values: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of ``ModelConfig``."""
    fields = parse_llama(values)
    return fields | {
        "attention_scales": [values.get("attention_multiplier", 1.0)] * fields["num_layers"],
        "embedding_multiplier": values.get("embedding_multiplier", 1.0),
        "residual_multiplier": values.get("residual_multiplier", 1.0),
        "logit_multiplier": 1 / values.get("logits_scaling", 1.0),
    }


ARCHITECTURES = {"GraniteForCausalLM": Architecture("granite", "Granite 3.x", _parse, LLAMA_DEFAULTS)}
