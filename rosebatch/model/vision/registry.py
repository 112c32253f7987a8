"""The models whose images are served, by transformers' classes."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rosebatch.config.model import ModelConfig
from rosebatch.core.errors import printable
from rosebatch.host.model_files import read_json
from rosebatch.model.vision.gemma3 import gemma3
from rosebatch.model.vision.gemma4 import gemma4
from rosebatch.model.vision.grid import GRIDS, grid
from rosebatch.model.vision.idefics3 import idefics3
from rosebatch.model.vision.internvl import internvl
from rosebatch.model.vision.llava import llava, llava_next, llava_onevision
from rosebatch.model.vision.pixels import PROCESSORS, read_processor
from rosebatch.model.vision.pixtral import lighton_ocr, pixtral
from rosebatch.model.vision.processed import PROCESSED, processed
from rosebatch.model.vision.qwen_vl import exaone4_5, qwen2_vl, qwen3_5, qwen3_vl
from rosebatch.model.vision.vision import Sight

# Each takes the folder, config.json and the shape of the text part; None if it does not know the tower, a text if it
# knows why not.
VISIONS: dict[str, Callable[[Path, Mapping[str, Any], ModelConfig], Sight | None]] = {
    "Gemma3ForConditionalGeneration": gemma3,
    "Gemma4ForConditionalGeneration": gemma4,
    "Idefics3ForConditionalGeneration": idefics3,
    "InternVLForConditionalGeneration": internvl,
    "LightOnOcrForConditionalGeneration": lighton_ocr,
    "LlavaForConditionalGeneration": llava,
    "LlavaNextForConditionalGeneration": llava_next,
    "LlavaNextVideoForConditionalGeneration": llava_next,
    "LlavaOnevisionForConditionalGeneration": llava_onevision,
    "Mistral3ForConditionalGeneration": pixtral,
    "Qwen2VLForConditionalGeneration": qwen2_vl,
    "Qwen2_5_VLForConditionalGeneration": qwen2_vl,
    "Qwen3_5ForConditionalGeneration": qwen3_5,
    "Qwen3_5MoeForConditionalGeneration": qwen3_5,
    "Qwen3VLForConditionalGeneration": qwen3_vl,
    "Qwen3VLMoeForConditionalGeneration": qwen3_vl,
    "SmolVLMForConditionalGeneration": idefics3,
    **dict.fromkeys(GRIDS, grid),
    **dict.fromkeys(PROCESSED, processed),
}
# The same of models that transformers' code runs.
OF_FALLBACK: dict[str, Callable[[Path, Mapping[str, Any], ModelConfig], Sight | None]] = {
    "Exaone4_5_ForConditionalGeneration": exaone4_5,
    "Gemma4ForConditionalGeneration": gemma4,
    **dict.fromkeys(GRIDS, grid),
}


def find_sight(folder: Path, config: ModelConfig) -> Sight:
    """How the model of a folder sees, or why only its texts are served.

    Args:
        folder: with config.json.
        config: the shape of its text part.
    """
    values = read_json(folder / "config.json")
    named = values.get("architectures")
    name = str(named[0] if isinstance(named, list) and named else None)
    known = VISIONS if config.transformers is None else OF_FALLBACK
    if (find := known.get(name)) is None:
        if config.transformers is not None and name in VISIONS:
            return f"transformers' code runs its text part, without {name}'s images"
        return f"its architecture, {printable(name)}, is none that docs/images.md lists"
    if not read_processor(folder):
        files = " nor ".join(PROCESSORS)
        return f"its folder has neither {files} with its image processor: copy them from the original model"
    try:
        found = find(folder, values, config)
    except (KeyError, TypeError, ValueError, AttributeError):
        found = None
    return "its config.json or its image processor has values that are not served" if found is None else found
