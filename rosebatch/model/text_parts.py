"""Models of more than text, by transformers' classes: what of config.json is the language model's, and of which kind.

Tokens of text have the same position in all sections of such a model's rotary positions, so plain ones serve.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from rosebatch.host.model_files import shown
from rosebatch.model.hf.fields import UnservedError
from rosebatch.model.registry import ARCHITECTURES


class Whole(NamedTuple):
    """A model with a part for text.

    Attributes:
        model_type: transformers' name of its config.
        models: that have it, for people.
        text_type: transformers' name of the text part's config, if config.json does not say.
        tied: whether the head is the embedding, if config.json does not say.
    """

    model_type: str
    models: str
    text_type: str
    tied: bool = False


WHOLES = {
    "AyaVisionForConditionalGeneration": Whole("aya_vision", "Aya Vision", "cohere2", tied=True),
    "Cohere2VisionForConditionalGeneration": Whole("cohere2_vision", "Command A Vision", "cohere2", tied=True),
    "DeepseekVLForConditionalGeneration": Whole("deepseek_vl", "DeepSeek-VL", "llama", tied=True),
    "FastVlmForConditionalGeneration": Whole("fast_vlm", "FastVLM", "qwen2"),
    "Gemma3ForConditionalGeneration": Whole("gemma3", "Gemma 3", "gemma3_text", tied=True),
    "Gemma4ForConditionalGeneration": Whole("gemma4", "Gemma 4", "gemma4_text", tied=True),
    "Gemma4UnifiedForConditionalGeneration": Whole("gemma4_unified", "Gemma 4 12B", "gemma4_unified_text", tied=True),
    "Glm46VForConditionalGeneration": Whole("glm46v", "GLM-4.6V-Flash", "glm4v_text"),
    "Glm4vForConditionalGeneration": Whole("glm4v", "GLM-4.1V", "glm4v_text"),
    "GlmOcrForConditionalGeneration": Whole("glm_ocr", "GLM-OCR", "glm_ocr_text"),
    "GotOcr2ForConditionalGeneration": Whole("got_ocr2", "GOT-OCR 2", "qwen2", tied=True),
    "Idefics2ForConditionalGeneration": Whole("idefics2", "Idefics 2", "mistral"),
    "Idefics3ForConditionalGeneration": Whole("idefics3", "Idefics 3, SmolVLM 1", "llama"),
    "InternVLForConditionalGeneration": Whole("internvl", "InternVL 2.5 to 3.5", "qwen2", tied=True),
    "JanusForConditionalGeneration": Whole("janus", "Janus Pro", "llama", tied=True),
    "LightOnOcrForConditionalGeneration": Whole("lighton_ocr", "LightOnOCR", "qwen3", tied=True),
    "LlavaForConditionalGeneration": Whole("llava", "LLaVA 1.5, Pixtral", "llama"),
    "LlavaNextForConditionalGeneration": Whole("llava_next", "LLaVA 1.6", "llama"),
    "LlavaNextVideoForConditionalGeneration": Whole("llava_next_video", "LLaVA-NeXT-Video", "llama"),
    "LlavaOnevisionForConditionalGeneration": Whole("llava_onevision", "LLaVA-OneVision", "qwen2"),
    "Mistral3ForConditionalGeneration": Whole("mistral3", "Mistral Small 3.1 and 3.2", "mistral", tied=True),
    "Ovis2ForConditionalGeneration": Whole("ovis2", "Ovis 2", "qwen2", tied=True),
    "PaddleOCRVLForConditionalGeneration": Whole("paddleocr_vl", "PaddleOCR-VL", "paddleocr_vl_text", tied=True),
    "PaliGemmaForConditionalGeneration": Whole("paligemma", "PaliGemma 1 and 2", "gemma", tied=True),
    "PerceptionLMForConditionalGeneration": Whole("perception_lm", "PerceptionLM", "llama"),
    "QianfanOCRForConditionalGeneration": Whole("qianfan_ocr", "Qianfan-OCR", "qwen3"),
    "Qwen2AudioForConditionalGeneration": Whole("qwen2_audio", "Qwen2-Audio", "qwen2"),
    "Qwen2VLForConditionalGeneration": Whole("qwen2_vl", "Qwen2-VL", "qwen2_vl_text"),
    "Qwen2_5_VLForConditionalGeneration": Whole("qwen2_5_vl", "Qwen2.5-VL, olmOCR", "qwen2_5_vl_text"),
    "Qwen3VLForConditionalGeneration": Whole("qwen3_vl", "Qwen3-VL", "qwen3_vl_text"),
    "Qwen3VLMoeForConditionalGeneration": Whole("qwen3_vl_moe", "Qwen3-VL with experts", "qwen3_vl_moe_text"),
    "Qwen3_5ForConditionalGeneration": Whole("qwen3_5", "Qwen3.5", "qwen3_5_text"),
    "Qwen3_5MoeForConditionalGeneration": Whole("qwen3_5_moe", "Qwen3.5 with experts", "qwen3_5_moe_text"),
    "SmolVLMForConditionalGeneration": Whole("smolvlm", "SmolVLM 2", "llama"),
    "VideoLlama3ForConditionalGeneration": Whole("video_llama_3", "VideoLLaMA 3", "qwen2"),
    "VideoLlavaForConditionalGeneration": Whole("video_llava", "Video-LLaVA", "llama"),
    "VipLlavaForConditionalGeneration": Whole("vipllava", "ViP-LLaVA", "llama"),
    "VoxtralForConditionalGeneration": Whole("voxtral", "Voxtral", "llama"),
}
_PART = "text_config"
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def _sized(*sizes: int, **others: Any) -> dict[str, Any]:
    return dict(zip(_SIZES, sizes, strict=True)) | others


_QWEN2_VL = _sized(
    152064, 8192, 29568, 80, 64, num_key_value_heads=8, rms_norm_eps=1e-5, max_window_layers=80, rope_theta=1e6
)
_QWEN3_VL_MOE = _sized(
    151936,
    *(2048, 5632, 24, 16),
    num_key_value_heads=16,
    num_experts=60,
    num_experts_per_tok=4,
    moe_intermediate_size=1408,
    rope_theta=5e5,
    max_position_embeddings=128000,
)
_PADDLEOCR_VL = _sized(
    *(103424, 1024, 3072, 18, 16),
    num_key_value_heads=2,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    max_position_embeddings=131072,
)
_GLM4V = {
    "rms_norm_eps": 1e-5,
    "partial_rotary_factor": 1.0,
    # Heads share the hidden size.
    "head_dim": None,
    "eos_token_id": None,
}
# What the config classes of text parts have beside the defaults of the architecture: folders leave out what equals it.
TEXT_DEFAULTS = {
    "llama": _sized(32000, 4096, 11008, 32, 32),
    "mistral": _sized(32000, 4096, 14336, 32, 32),
    "qwen2": _sized(151936, 4096, 22016, 32, 32),
    "qwen3": _sized(151936, 4096, 22016, 32, 32),
    "qwen3_moe": _sized(151936, 2048, 6144, 24, 32),
    "gpt_oss": _sized(201088, 2880, 2880, 36, 64),
    "cohere2": _sized(256000, 8192, 22528, 40, 64),
    "qwen3_5_text": _sized(248320, 4096, 12288, 32, 16),
    "qwen2_vl_text": {**_QWEN2_VL, "eos_token_id": 151645},
    "qwen2_5_vl_text": {**_QWEN2_VL, "eos_token_id": 151645},
    "qwen3_vl_text": _sized(151936, 4096, 22016, 32, 32, rope_theta=5e5, max_position_embeddings=128000),
    "qwen3_vl_moe_text": _QWEN3_VL_MOE,
    "glm4v_text": _sized(151552, 4096, 13696, 40, 32, max_position_embeddings=32768, **_GLM4V),
    "glm_ocr_text": _sized(59392, 1024, 4096, 16, 16, num_key_value_heads=8, **_GLM4V),
    "paddleocr_vl_text": _PADDLEOCR_VL,
}
_ALIASES = {
    "glm4v_text": "glm4",
    "glm_ocr_text": "glm4",
    "paddleocr_vl_text": "llama",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
    "qwen3_vl_moe_text": "qwen3_moe",
}
# Values that a config class fixes, whatever its file says.
_FIXED: dict[str, dict[str, Any]] = {
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
    "glm4v_text": {"attention_bias": True, "head_dim": None},
    "glm_ocr_text": {"attention_bias": False},
}
# Values by other names in some config classes.
_RENAMED: dict[str, dict[str, tuple[str, ...]]] = {"paddleocr_vl_text": {"use_bias": ("attention_bias", "mlp_bias")}}
# The whole model's values of these win, as in transformers.
_OF_WHOLE = ("eos_token_id", "dtype", "torch_dtype", "quantization_config")
_BY_MODEL_TYPE = {architecture.model_type: name for name, architecture in ARCHITECTURES.items()}


def text_values(whole: Whole, values: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """The class and the values of a language model that is a part, as if it were alone.

    Args:
        whole: the model's row in ``WHOLES``.
        values: of config.json.

    Raises:
        KeyError, ValueError: there is no such part.
        UnservedError: its class is none of rosebatch's.
    """
    # Older folders of Qwen2-VL have its fields beside the others.
    own = values if _PART not in values and "hidden_size" in values else values[_PART]
    if not isinstance(own, dict):
        raise ValueError(f"{_PART} is no object: {shown(own)}")
    kind = own.get("model_type")
    kind = whole.text_type if kind in (None, whole.model_type) else kind
    name = _BY_MODEL_TYPE.get(_ALIASES.get(kind, kind)) if isinstance(kind, str) else None
    if name is None:
        raise UnservedError(f"{_PART} of type {shown(kind)} is not supported")
    found = {**TEXT_DEFAULTS.get(kind, {}), **own, **_FIXED.get(kind, {}), "architectures": [name]}
    for stored, names in _RENAMED.get(kind, {}).items():
        found |= dict.fromkeys(names, own.get(stored) or False)
    if whole.model_type == "paligemma":
        # Of prompts with images: its classes say so of all.
        found["use_bidirectional_attention"] = None
    found |= {key: values[key] for key in _OF_WHOLE if values.get(key) is not None}
    # Either may say so: a head that is stored and differs wins.
    tied = values.get("tie_word_embeddings")
    found["tie_word_embeddings"] = (whole.tied if tied is None else tied) or own.get("tie_word_embeddings") or False
    return name, found
