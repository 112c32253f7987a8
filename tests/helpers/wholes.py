"""Tiny random models of more than text, by transformers' classes."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from rosebatch.model.text_parts import WHOLES, Whole

# Whose text part transformers' code runs.
_OF_FALLBACK = {
    "Glm4vMoeForConditionalGeneration": Whole("glm4v_moe", "GLM-4.5V", "glm4v_moe_text"),
    "HunYuanVLForConditionalGeneration": Whole("hunyuan_vl", "HunyuanOCR", "hunyuan_vl_text", tied=True),
    "HyperCLOVAXVisionV2ForConditionalGeneration": Whole(
        "hyperclovax_vision_v2", "HyperCLOVA X SEED Think", "hyperclovax", tied=True
    ),
    "Exaone4_5_ForConditionalGeneration": Whole("exaone4_5", "EXAONE 4.5", "exaone4"),
}
_TEXT: dict[str, Any] = {
    "vocab_size": 211,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "sliding_window": 24,
    "num_experts": 5,
    "num_local_experts": 5,
    "n_routed_experts": 5,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 28,
    "shared_expert_intermediate_size": 36,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 20,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "mlp_only_layers": [],
    "layer_types": None,
}
# Of a head's rotated channel pairs.
_ROPES: dict[str, dict[str, Any]] = {
    "qwen2_vl_text": {"mrope_section": [2, 3, 3]},
    "qwen2_5_vl_text": {"mrope_section": [2, 3, 3]},
    "qwen3_vl_text": {"mrope_section": [4, 2, 2]},
    "glm4v_text": {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
    "glm4v_moe_text": {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5},
    "hunyuan_vl_text": {"mrope_section": [2, 2, 2, 2]},
    "glm_ocr_text": {"mrope_section": [2, 3, 3]},
    "paddleocr_vl_text": {"mrope_section": [2, 3, 3]},
}
# Of all kinds of towers; no token of theirs is tried.
_OTHERS: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "embed_dim", "d_model", "projection_dim"), 32),
    **dict.fromkeys(("intermediate_size", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("num_hidden_layers", "depth", "encoder_layers"), 1),
    **dict.fromkeys(("num_attention_heads", "num_heads", "encoder_attention_heads", "mlp_ratio"), 2),
    "out_hidden_size": 64,
    "image_size": 28,
    "patch_size": 14,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
    "fullatt_block_indexes": [0],
    "max_source_positions": 50,
    "num_embeddings": 16,
}
_MARKS = (
    *("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id"),
    *("vision_start_token_id", "vision_end_token_id"),
)


def tiny_whole(
    name: str,
    tied: bool | None = None,
    text_type: str | None = None,
    *,
    others: Mapping[str, Any] = MappingProxyType({}),
    own: Mapping[str, Any] = MappingProxyType({}),
    **text: Any,
) -> Any:
    """A random model of a class; its text part may be of another type than usual, with further values.

    ``others`` are those of its other parts, which may be of another type, too. ``own`` are its own, if it has such.
    """
    import transformers
    from transformers import AutoConfig

    own_types = (WHOLES | _OF_FALLBACK)[name]
    whole = AutoConfig.for_model(own_types.model_type)
    values = {key: value for key, value in {**dict.fromkeys(_MARKS, 210), **own}.items() if hasattr(whole, key)}
    values |= {key: _TEXT[key] for key in ("vocab_size", "hidden_size") if hasattr(whole, key)}
    for key, part in vars(whole).items():
        if isinstance(part, transformers.PreTrainedConfig):
            if key == "text_config":
                values[key] = _small(text_type or own_types.text_type, _TEXT | text)
            else:
                values[key] = _small(others.get("model_type", part.model_type), {**_OTHERS, **others})
    if tied is not None:
        values["tie_word_embeddings"] = tied
    torch.manual_seed(0)
    model = getattr(transformers, name)(type(whole)(**values)).eval()
    for key, parameter in model.named_parameters():
        mean = 1.0 if parameter.ndim == 1 and key.endswith("weight") else 0.0
        torch.nn.init.normal_(parameter, mean, 0.1)
    return model


def _small(model_type: str, table: dict[str, Any]) -> dict[str, Any]:
    from transformers import AutoConfig

    own = AutoConfig.for_model(model_type).to_dict()
    own |= {"num_experts": own.get("num_local_experts")} if "num_local_experts" in own else {}
    values = {key: value for key, value in table.items() if key in own}
    if model_type in _ROPES:
        values["rope_parameters"] = {"rope_type": "default", **_ROPES[model_type]}
    return {**values, "model_type": model_type}


def save(model: Any, folder: Path) -> Any:
    """Write a model's folder, and read it back: what it holds is what is compared."""
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
