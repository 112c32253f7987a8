"""config.json of Phi-3, Phi-4 and Phi-4-mini."""

from collections.abc import Mapping
from typing import Any

from rosebatch.model.configs.fields import decoder, windows
from rosebatch.model.configs.rope import rope, rotary_dim, rotary_share

# Of transformers' config class.
PHI3_DEFAULTS = {
    "max_position_embeddings": 4096,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 32000,
    "hidden_act": "silu",
}
# Former names of longrope.
_LONGROPE = ("su", "yarn")


def phi3(values: Mapping[str, Any]) -> dict[str, Any]:
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
