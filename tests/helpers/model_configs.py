"""Shapes of models that only have to be complete."""

from typing import Any

from rosebatch.config.model import ModelConfig

_SMALL = {
    "family": "llama",
    "vocab_size": 50,
    "hidden_size": 32,
    "num_layers": 1,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "intermediate_size": 24,
    "max_model_len": 40,
    "norm_eps": 1e-5,
    "activation": "silu",
}


def small_config(**values: Any) -> ModelConfig:
    """A config with these values in place of small ones."""
    return ModelConfig(**{**_SMALL, **values})
