"""What the families' parsers share: fields that most configs have, checked, and options that are refused."""

from collections.abc import Collection, Mapping
from typing import Any

from rosebatch.config.limits import MAX_LAYERS, MAX_SIZE
from rosebatch.config.model import ModelConfig
from rosebatch.host.model_files import shown
from rosebatch.ops.ops import GATES

# Dtypes of checkpoints that no run has -> those of their runs.
_RUN_DTYPES = {"float64": "float32", "float8_e4m3fn": "bfloat16", "float8_e5m2": "bfloat16"}
_LAYER_TYPES = ("sliding_attention", "full_attention")


class UnservedError(ValueError):
    """An option that would change the result and that the family's class here does not have."""


def decoder(
    values: Mapping[str, Any],
    family: str,
    *,
    eps: str | None = "rms_norm_eps",
    activation: str = "hidden_act",
    activations: Collection[str] = GATES.keys(),
) -> dict[str, Any]:
    """The fields that all decoders have.

    Args:
        values: of config.json, completed by the architecture's defaults.
        family: see ``ModelConfig``.
        eps, activation: names of these fields in config.json; no ``eps`` if the norms have none.
        activations: those that are served, by transformers' names.
    """
    hidden, layers, heads = (size(values, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    return {
        "family": family,
        "vocab_size": values["vocab_size"],
        "hidden_size": hidden,
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": values.get("num_key_value_heads") or heads,
        "head_dim": values.get("head_dim") or hidden // heads,
        "intermediate_size": values["intermediate_size"],
        "max_model_len": values["max_position_embeddings"],
        "norm_eps": 0.0 if eps is None else values[eps],
        "activation": supported(activation, values[activation], activations),
        "tie_word_embeddings": values.get("tie_word_embeddings", False),
    }


def end_tokens(value: Any) -> list[int]:
    """``eos_token_id`` of a file: an id, several or none."""
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if any(type(token_id) is not int for token_id in ids):
        raise ValueError(f"eos_token_id must be a token id or a list of them, got {shown(value)}")
    return ids


def run_dtype(dtype: Any) -> Any:
    """The dtype of a run, by that of its checkpoint."""
    return _RUN_DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype


def attention_biases(values: Mapping[str, Any]) -> dict[str, Any]:
    """Whether q, k, v and the projection after attention have biases: one option of config.json."""
    bias = values.get("attention_bias", False)
    return {"qkv_bias": bias, "out_bias": bias}


def local_experts(values: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """The experts of a model that has them in all layers, with the names that Mixtral gave."""
    return {
        "layers": [True] * layers,
        "num_experts": size(values, "num_local_experts"),
        "experts_per_token": size(values, "num_experts_per_tok"),
        "expert_size": size(values, "intermediate_size"),
    }


def size(values: Mapping[str, Any], name: str) -> int:
    """A size, checked before anything is computed of it."""
    value = values[name]
    if type(value) is not int:
        raise ValueError(f"{name} must be a whole number, got {shown(value)}")
    limit = MAX_LAYERS if "layer" in name else MAX_SIZE
    if not 1 <= value <= limit:
        raise ValueError(f"{name} must be in [1, {limit}], got {shown(value)}")
    return value


def supported(option: str, value: Any, served: Any) -> Any:
    """The value, if it is among those that are served."""
    if value not in served:
        raise UnservedError(f"{option} {shown(value)} is not supported; supported are {', '.join(served)}")
    return value


def refuse(values: Mapping[str, Any], *names: str) -> None:
    """Raise if one of these options is on."""
    for name in names:
        if values.get(name):
            raise UnservedError(f"{name} is not supported")


def layer_types(values: Mapping[str, Any], default: list[str]) -> list[str]:
    """``sliding_attention`` or ``full_attention`` for each layer."""
    return [supported("layer_types", kind, _LAYER_TYPES) for kind in values.get("layer_types") or default]


def every(interval: Any, layers: int) -> list[str]:
    """Types of layers: all slide but each ``interval``-th."""
    if type(interval) is not int or not 0 < interval < MAX_SIZE:
        raise ValueError(f"sliding_window_pattern must be a whole number > 0, got {shown(interval)}")
    return ["full_attention" if (i + 1) % interval == 0 else "sliding_attention" for i in range(layers)]


def windows(values: Mapping[str, Any], kinds: list[str]) -> list[int]:
    """Keys that a query sees, for each layer of these types."""
    if "sliding_attention" not in kinds:
        return [0] * len(kinds)
    window = values["sliding_window"]
    if type(window) is not int or window < 1:
        raise ValueError(f"sliding_window must be a whole number > 0, got {shown(window)}")
    return [window * (kind == "sliding_attention") for kind in kinds]


def decoder_values(config: ModelConfig) -> dict[str, Any]:
    """The values of config.json that most decoders have, of a shape."""
    return {
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_model_len,
        "rms_norm_eps": config.norm_eps,
    }
