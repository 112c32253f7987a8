"""The models whose images are served, by transformers' classes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rosebatch.config.model import ModelConfig
from rosebatch.host.model_files import read_json
from rosebatch.model.vision.idefics3 import idefics3
from rosebatch.model.vision.internvl import internvl
from rosebatch.model.vision.pixels import read_processor
from rosebatch.model.vision.pixtral import pixtral
from rosebatch.model.vision.qwen_vl import qwen2_5_vl, qwen3_5, qwen3_vl
from rosebatch.model.vision.vision import Vision

# Each takes the folder, config.json and the shape of the text part; None if it does not know the tower.
VISIONS: dict[str, Callable[[Path, Mapping[str, Any], ModelConfig], Vision | None]] = {
    "Idefics3ForConditionalGeneration": idefics3,
    "InternVLForConditionalGeneration": internvl,
    "LlavaForConditionalGeneration": pixtral,
    "Mistral3ForConditionalGeneration": pixtral,
    "Qwen2_5_VLForConditionalGeneration": qwen2_5_vl,
    "Qwen3_5ForConditionalGeneration": qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5,
    "Qwen3VLForConditionalGeneration": qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": qwen3_vl,
    "SmolVLMForConditionalGeneration": idefics3,
}


def find_vision(folder: Path, config: ModelConfig) -> Vision | None:
    """How the model of a folder sees; None for a model of text, or if the folder does not say all of it.

    Args:
        folder: with config.json.
        config: the shape of its text part.
    """
    if not read_processor(folder):
        return None
    values = read_json(folder / "config.json")
    named = values.get("architectures") or [None]
    find = VISIONS.get(named[0]) if isinstance(named, list) else None
    try:
        return None if find is None else find(folder, values, config)
    except (KeyError, TypeError, ValueError, AttributeError):
        # Its text part is served all the same.
        return None
