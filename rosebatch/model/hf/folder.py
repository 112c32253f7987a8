"""ModelConfig -> transformers' config.json, so that other code can build the same shape with random weights."""

import json
from pathlib import Path
from typing import Any

import msgspec

from rosebatch.config.model import ModelConfig
from rosebatch.core.errors import UserError
from rosebatch.model.hf.config import parse_model_config
from rosebatch.model.registry import FAMILIES


def write_config(config: ModelConfig, folder: Path) -> None:
    """Write ``folder/config.json``. ``rosebatch.model.hf.config`` reads the same shape back from it.

    Raises:
        UserError: transformers has no architecture with these options.
    """
    try:
        values = hf_values(config)
    except UserError as error:
        raise UserError(f"--against: {error}") from None
    (folder / "config.json").write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def has_config(config: ModelConfig) -> bool:
    """Whether transformers has models of this family, so that other code can build their shapes."""
    return config.family in FAMILIES and bool(FAMILIES[config.family].hf_values)


def hf_values(config: ModelConfig) -> dict[str, Any]:
    """The values of that file.

    Raises:
        UserError: transformers has no architecture with these options.
    """
    make = FAMILIES[config.family].hf_values if config.family in FAMILIES else None
    if make is None:
        raise UserError(f"other engines cannot run models of the family {config.family}")
    values = make(config)
    eos = list(config.eos_token_ids)
    values |= {
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tie_word_embeddings,
        "eos_token_id": eos[0] if len(eos) == 1 else eos or None,
        "torch_dtype": config.dtype,
    }
    # How K and V are stored is of the run.
    own = msgspec.structs.replace(config, kv_cache_dtype="auto")
    if _plain(parse_model_config(values, "config.json")) != _plain(own):
        raise UserError(
            "no config.json can be written for a shape with these options, such as biases or windows of the family "
            f"{config.family}; give the model's transformers folder with --model"
        )
    return values


def _plain(config: ModelConfig) -> ModelConfig:
    """With a factor on q·k for every layer, which is optional; families whose layers keep states have none."""
    if config.num_state_layers:
        return config
    scales = tuple(config.attention_scale(layer) for layer in range(config.num_layers))
    return msgspec.structs.replace(config, attention_scales=scales)
