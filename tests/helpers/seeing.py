"""Tiny random models that see, their images, and what transformers makes of both."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from msgspec import structs
from tokenizers import Tokenizer
from torch import Tensor

from rosebatch.core.images import PromptImage
from rosebatch.core.request import Request
from rosebatch.model.vision.cohere2 import Cohere2ImageProcessor
from rosebatch.model.vision.pixels import Normalizer
from rosebatch.model.vision.vision import Processor, Vision
from tests.helpers.byte_tokenizer import byte_backend, save_backend
from tests.helpers.wholes import save, tiny_whole

# After the bytes and the end token of the tokenizer. Marks are around an image, or after its rows and after the last.
IMAGE, FIRST_MARK, SECOND_MARK = 257, 258, 259
_TEMPLATE = """
{%- for message in messages -%}
[{{ message.role }}:
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}IMAGE{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}]
{%- endfor -%}
[assistant:"""
# Height and width. The first become 4 x 4 tokens; one has fewer pixels than a patch, and three rows are no channels.
SIZES = ((32, 32), (32, 32), (72, 24), (3, 60), (1, 1))
_COLOURS = {"image_mean": [0.4, 0.5, 0.6], "image_std": [0.3, 0.25, 0.2]}


class Family(NamedTuple):
    """Models whose images are cut alike.

    Attributes:
        tokens: the placeholder, both marks, and further ones.
        in_template: what the chat template writes for an image.
        processor: of preprocessor_config.json.
        tower: of the tower's config.
        options: of transformers' image processor, beside those of its file.
        own: further values of the whole model's config.
        text_type: of the text part, if it is not the usual one.
        text: further values of its config.
        budget: least tokens of a step that has room for an image.
        nested: whether transformers cuts an image otherwise where its prompt has several.
        written: what the chat template writes in place of all that.
        whole: of processor_config.json.
        named: what the tokenizer calls some tokens.
        both_ways: whether all tokens of a prompt with images see each other.
    """

    tokens: tuple[str, ...]
    in_template: str
    processor: dict[str, Any]
    tower: dict[str, Any]
    options: dict[str, Any] = {}
    own: dict[str, Any] = {}
    text_type: str | None = None
    text: dict[str, Any] = {}
    budget: int = 0
    nested: bool = False
    written: str = ""
    whole: dict[str, Any] = {}
    named: dict[str, str] = {}
    both_ways: bool = False


_QWEN = Family(
    ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>"),
    "<|vision_start|><|image_pad|><|vision_end|>",
    {
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "patch_size": 4,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 256, "longest_edge": 2048},
    },
    {
        "patch_size": 4,
        "temporal_patch_size": 2,
        "spatial_merge_size": 2,
        "depth": 3,
        "deepstack_visual_indexes": [0, 2],
        "fullatt_block_indexes": [1],
        "window_size": 16,
    },
)
_MISTRAL = Family(
    ("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "[IMG]",
    {"image_processor_type": "PixtralImageProcessorFast", "patch_size": 4, "size": {"longest_edge": 40}},
    {"patch_size": 4, "image_size": 40, "head_dim": 16, "num_hidden_layers": 2},
    {"patch_size": 8},
)
_PIXTRAL = _MISTRAL._replace(
    tower=_MISTRAL.tower | {"model_type": "pixtral", "patch_size": 8},
    own={"vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
)
_INTERNVL = Family(
    ("<IMG_CONTEXT>", "<img>", "</img>"),
    "<IMG_CONTEXT>",
    {
        "image_processor_type": "GotOcr2ImageProcessorFast",
        "size": {"height": 16, "width": 16},
        "min_patches": 1,
        "max_patches": 4,
    },
    {"patch_size": [4, 4], "image_size": [16, 16], "num_hidden_layers": 2},
    {"crop_to_patches": True},
)
_SMOLVLM = Family(
    (
        *("<image>", "<fake_token_around_image>", "<global-img>"),
        *("<row_1_col_1>", "<row_1_col_2>", "<row_2_col_1>", "<row_2_col_2>"),
    ),
    "<image>",
    {
        "image_processor_type": "SmolVLMImageProcessorFast",
        "size": {"longest_edge": 32},
        "max_image_size": {"longest_edge": 16},
    },
    {"patch_size": 4, "image_size": 16, "num_hidden_layers": 2},
    own={"scale_factor": 2},
)
_GEMMA = Family(
    ("<image_soft_token>", "<start_of_image>", "<end_of_image>"),
    "\n\n<start_of_image><image_soft_token><end_of_image>\n\n",
    {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 16, "width": 16}},
    {"patch_size": 4, "image_size": 16, "num_hidden_layers": 2, "vision_use_head": False},
    own={"mm_tokens_per_image": 4},
    # Behind a window that is shorter than an image, other versions of transformers have other masks.
    text={"sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
    written="<start_of_image>",
)
_GEMMA4 = Family(
    ("<|image|>", "<|image>", "<image|>"),
    "<|image|>",
    {
        "image_processor_type": "Gemma4ImageProcessor",
        "patch_size": 4,
        "pooling_kernel_size": 2,
        "max_soft_tokens": 70,
        "do_normalize": False,
    },
    {},
    own={
        "vision_config": {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "head_dim": 8,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "position_embedding_size": 160,
            "patch_size": 4,
            "pooling_kernel_size": 2,
            "standardize": True,
            "use_clipped_linears": True,
        },
    },
    text={
        "sliding_window": 24,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "per_layer_config": {1: {"head_dim": 32}, 3: {"head_dim": 32}},
        "max_position_embeddings": 640,
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
    },
    budget=80,
)
_GEMMA4_E2B = _GEMMA4._replace(
    text=_GEMMA4.text
    | {"hidden_size_per_layer_input": 8, "use_bidirectional_attention": None}
    | {"num_kv_shared_layers": 2},
)
_LLAVA = Family(
    ("<image>", "<one>", "<two>"),
    "<image>",
    {
        "image_processor_type": "LlavaImageProcessor",
        "size": {"shortest_edge": 16},
        "crop_size": {"height": 16, "width": 16},
    },
    {"patch_size": 8, "image_size": 16, "num_hidden_layers": 2},
)
_SHAPES = [[16, 32], [32, 16], [32, 32], [48, 16], [16, 48]]
_LLAVA_NEXT = _LLAVA._replace(
    processor=_LLAVA.processor | {"image_processor_type": "LlavaNextImageProcessor", "image_grid_pinpoints": _SHAPES},
    own={"image_grid_pinpoints": _SHAPES},
)
_GRANITE = _LLAVA_NEXT._replace(
    tower=_LLAVA.tower | {"model_type": "siglip_vision_model", "vision_use_head": False},
    own=_LLAVA_NEXT.own | {"vision_feature_layer": [-3, -1], "vision_feature_select_strategy": "full"},
    text_type="granite",
)
_LLAVA_ONEVISION = _LLAVA._replace(
    processor={
        "image_processor_type": "LlavaOnevisionImageProcessor",
        "image_grid_pinpoints": _SHAPES,
        "size": {"height": 16, "width": 16},
    },
    tower=_LLAVA.tower | {"vision_use_head": False},
    own={"image_grid_pinpoints": _SHAPES, "vision_aspect_ratio": "anyres_max_3"},
    nested=True,
)
_AYA = Family(
    ("<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE", "TILE_GLOBAL"),
    "<|IMG_PATCH|>",
    _INTERNVL.processor | {"min_patches": 1},
    {"patch_size": 4, "image_size": 16, "num_hidden_layers": 2, "vision_use_head": False},
    {"crop_to_patches": True},
    own={"downsample_factor": 2, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    # transformers 5 leaves the factor out.
    text={"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2, "logit_scale": 1.0},
    written="<image>",
    whole={"processor_class": "AyaVisionProcessor", "patch_size": 4, "img_size": 16, "downsample_factor": 2},
)
_EXAONE = _QWEN._replace(
    tower=_QWEN.tower | {"num_key_value_heads": 1},
    text={"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2},
)
_DEEPSEEK = Family(
    ("<image_placeholder>", "<begin_of_image>", "<end_of_image>"),
    "<image_placeholder>",
    {"image_processor_type": "DeepseekVLImageProcessor", "size": {"height": 16, "width": 16}, "min_size": 4},
    {"patch_size": 4, "image_size": 16, "num_hidden_layers": 2, "vision_use_head": False},
    whole={"processor_class": "DeepseekVLProcessor", "num_image_tokens": 16},
    named={"image_token": "<image_placeholder>"},
)
_JANUS = _DEEPSEEK._replace(
    processor=_DEEPSEEK.processor | {"image_processor_type": "JanusImageProcessor"},
    # That of the result.
    tower=_DEEPSEEK.tower | {"projection_dim": 64},
    whole={"processor_class": "JanusProcessor", "num_image_tokens": 16},
    named=_DEEPSEEK.named | {"boi_token": "<begin_of_image>", "eoi_token": "<end_of_image>"},
)
_PALIGEMMA = Family(
    ("<image>", "<one>", "<two>"),
    "<image>",
    {"image_processor_type": "SiglipImageProcessor", "size": {"height": 16, "width": 16}, "image_seq_length": 16},
    {"patch_size": 4, "image_size": 16, "num_hidden_layers": 2, "vision_use_head": False, "projection_dim": 64},
    own={"projection_dim": 64},
    budget=200,
    whole={"processor_class": "PaliGemmaProcessor"},
    both_ways=True,
)
_VIPLLAVA = _LLAVA._replace(
    processor=_LLAVA.processor | {"image_processor_type": "CLIPImageProcessor"},
    own={"vision_feature_layers": [-2, -1]},
    whole={
        "processor_class": "LlavaProcessor",
        "patch_size": 8,
        "num_additional_image_tokens": 1,
        "vision_feature_select_strategy": "default",
    },
    named={"image_token": "<image>"},
)
_GLM4V = _QWEN._replace(
    tokens=("<|image|>", "<|begin_of_image|>", "<|end_of_image|>"),
    in_template="<|begin_of_image|><|image|><|end_of_image|>",
    processor=_QWEN.processor
    | {"image_processor_type": "Glm4vImageProcessor", "size": {"shortest_edge": 512, "longest_edge": 4096}},
    tower=_QWEN.tower | {"image_size": 16},
)
_PADDLEOCR = _QWEN._replace(
    tokens=("<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"),
    in_template="<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>",
    processor=_QWEN.processor | {"image_processor_type": "PaddleOCRVLImageProcessor", "temporal_patch_size": 1},
    tower={"patch_size": 4, "image_size": 16, "spatial_merge_size": 2, "num_hidden_layers": 2},
)
_COHERE = Family(
    ("<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"),
    "<|IMG_PATCH|>",
    _INTERNVL.processor | {"image_processor_type": "Cohere2VisionImageProcessorFast", "patch_size": 2},
    {"patch_size": 4, "image_size": 16, "num_hidden_layers": 2, "vision_use_head": False},
    own={"downsample_factor": 2, "alignment_intermediate_size": 48},
    # transformers 5 leaves the factor out.
    text={"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"] * 2, "logit_scale": 1.0},
    whole={"processor_class": "Cohere2VisionProcessor"},
    named={
        "image_token": "<|IMG_PATCH|>",
        "boi_token": "<|START_OF_IMG|>",
        "eoi_token": "<|END_OF_IMG|>",
        "img_line_break_token": "<|IMG_LINE_BREAK|>",
    },
)
FAMILIES = {
    "Cohere2VisionForConditionalGeneration": _COHERE,
    "AyaVisionForConditionalGeneration": _AYA,
    "DeepseekVLForConditionalGeneration": _DEEPSEEK,
    "JanusForConditionalGeneration": _JANUS,
    "Exaone4_5_ForConditionalGeneration": _EXAONE,
    "VipLlavaForConditionalGeneration": _VIPLLAVA,
    "Gemma3ForConditionalGeneration": _GEMMA,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Gemma4ForConditionalGeneration-E2B": _GEMMA4_E2B,
    "Glm46VForConditionalGeneration": _GLM4V._replace(
        processor=_GLM4V.processor | {"image_processor_type": "Glm46VImageProcessor"}
    ),
    "Glm46VForConditionalGeneration-Moe": _GLM4V._replace(
        processor=_GLM4V.processor | {"image_processor_type": "Glm46VImageProcessor"}, text_type="glm4v_moe_text"
    ),
    "Glm4vForConditionalGeneration": _GLM4V,
    "Glm4vMoeForConditionalGeneration": _GLM4V,
    "GlmOcrForConditionalGeneration": _GLM4V,
    "HunYuanVLForConditionalGeneration": _QWEN._replace(
        processor=_QWEN.processor | {"image_processor_type": "HunYuanVLImageProcessor", "temporal_patch_size": 1},
        tower={"patch_size": 4, "num_hidden_layers": 2, "max_image_size": 64},
    ),
    # The tower's result is as wide as the tower; a projector widens it.
    "HyperCLOVAXVisionV2ForConditionalGeneration": _QWEN._replace(tower=_QWEN.tower | {"out_hidden_size": 32}),
    "Idefics3ForConditionalGeneration": _SMOLVLM._replace(
        processor=_SMOLVLM.processor | {"image_processor_type": "Idefics3ImageProcessorFast"}
    ),
    "InternVLForConditionalGeneration": _INTERNVL,
    "LightOnOcrForConditionalGeneration": _MISTRAL._replace(
        processor=_MISTRAL.processor | {"patch_size": 8}, tower=_MISTRAL.tower | {"model_type": "pixtral"}, options={}
    ),
    "LlavaForConditionalGeneration": _LLAVA,
    "LlavaForConditionalGeneration-Pixtral": _PIXTRAL,
    "LlavaNextForConditionalGeneration": _LLAVA_NEXT,
    "LlavaNextForConditionalGeneration-Granite": _GRANITE,
    "LlavaNextVideoForConditionalGeneration": _LLAVA_NEXT,
    "LlavaOnevisionForConditionalGeneration": _LLAVA_ONEVISION,
    "Mistral3ForConditionalGeneration": _MISTRAL,
    "PaddleOCRVLForConditionalGeneration": _PADDLEOCR,
    "PaliGemmaForConditionalGeneration": _PALIGEMMA,
    "PaliGemmaForConditionalGeneration-2": _PALIGEMMA._replace(
        text_type="gemma2",
        text={
            "sliding_window": 160,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "max_position_embeddings": 512,
        },
    ),
    "GotOcr2ForConditionalGeneration": Family(
        ("<imgpad>", "<img>", "</img>"),
        "<img><imgpad></img>",
        {"image_processor_type": "GotOcr2ImageProcessor", "size": {"height": 64, "width": 64}},
        {
            "patch_size": 4,
            "image_size": 64,
            "num_hidden_layers": 2,
            "global_attn_indexes": [1],
            "window_size": 5,
            "mlp_dim": 48,
            "output_channels": 16,
        },
        whole={"processor_class": "GotOcr2Processor", "num_image_tokens": 16},
    ),
    "QianfanOCRForConditionalGeneration": _INTERNVL._replace(
        whole={"processor_class": "QianfanOCRProcessor", "image_seq_length": 4},
        written="<image>",
        named={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
        },
    ),
    # The tower's hidden size is that of its result.
    "Qwen2VLForConditionalGeneration": _QWEN._replace(tower=_QWEN.tower | {"hidden_size": 64}),
    "Qwen2_5_VLForConditionalGeneration": _QWEN,
    "Qwen3VLForConditionalGeneration": _QWEN,
    "Qwen3VLMoeForConditionalGeneration": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": _QWEN,
    "SmolVLMForConditionalGeneration": _SMOLVLM,
    "VideoLlama3ForConditionalGeneration": _QWEN._replace(
        processor=_QWEN.processor | {"image_processor_type": "VideoLlama3ImageProcessor", "temporal_patch_size": 1},
        tower={"patch_size": 4, "num_hidden_layers": 2},
    ),
}


def class_of(name: str) -> str:
    """transformers' class of a family by this name."""
    return name.partition("-")[0]


def seeing_model(name: str, folder: Path) -> Any:
    """A random model of a family, written into a folder, with its image processor and tokenizer."""
    family = FAMILIES[name]
    own = {"image_token_id": IMAGE, "image_token_index": IMAGE}
    own |= {"vision_start_token_id": FIRST_MARK, "vision_end_token_id": SECOND_MARK}
    own |= {"boi_token_id": FIRST_MARK, "eoi_token_id": SECOND_MARK}
    # Behind a window, fewer blocks than a prompt's preempt nothing.
    text = {"vocab_size": 264, "sliding_window": None, "embedding_multiplier": 3.0} | family.text
    model = tiny_whole(class_of(name), text_type=family.text_type, others=family.tower, own=own | family.own, **text)
    # transformers takes one that was generated for an image.
    torch.nn.init.zeros_(model.lm_head.weight[IMAGE])
    (folder / "preprocessor_config.json").write_text(json.dumps(family.processor | _COLOURS))
    backend = byte_backend()
    backend.add_special_tokens(list(family.tokens))
    template = _TEMPLATE.replace("IMAGE", family.written or family.in_template)
    named = {"extra_special_tokens": family.named} if family.named else {}
    save_backend(backend, folder, chat_template=template, eos_token="<eos>", **named)
    if family.whole:
        (folder / "processor_config.json").write_text(json.dumps(family.whole))
    return save(model, folder)


def load_processor(folder: Path, vision: Vision, max_pixels: int | None = None) -> Processor:
    """rosebatch's image processor of a folder."""
    backend = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return vision.processor(max_pixels, lambda text: backend.encode(text, add_special_tokens=False).ids)


def picture(number: int) -> np.ndarray:
    """Random pixels of the size of this number; those of equal numbers are equal."""
    height, width = SIZES[number]
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


def request(
    family: Family, processor: Processor, id: int, parts: Sequence[int | Sequence[int]], **options: Any
) -> Request:
    """A prompt of parts: token ids, or the number of an image."""
    ids = {token: IMAGE + number for number, token in enumerate(family.tokens)}
    before, after = (_encoded(text, ids) for text in family.in_template.split(family.tokens[0]))
    token_ids: list[int] = []
    images = []
    alone = sum(isinstance(part, int) for part in parts) == 1
    for part in parts:
        if isinstance(part, int):
            patches = processor(picture(part), alone=alone)
            token_ids += before
            gets_vector = patches.token_ids == IMAGE
            digest = bytes([part, len(patches.token_ids)]) * 16
            images.append(PromptImage(len(token_ids), gets_vector, patches.grid, digest, patches.values))
            token_ids += patches.token_ids.tolist()
            token_ids += after
        else:
            token_ids += part
    if family.both_ways:
        images = [structs.replace(image, whole_prompt=len(token_ids)) for image in images]
    return Request(id, tuple(token_ids), images=tuple(images), **options)


def _encoded(text: str, ids: Mapping[str, int]) -> list[int]:
    """Of bytes, and marks with these ids."""
    for mark, token_id in ids.items():
        before, found, after = text.partition(mark)
        if found:
            return [*before.encode(), token_id, *after.encode()]
    return [*text.encode()]


def reference_logits(
    family: Family,
    model: Any,
    folder: Path,
    parts: Sequence[int | Sequence[int]],
    token_ids: Sequence[int],
    prompt: int,
) -> Tensor:
    """``[tokens, V]`` of transformers, with images by its own image processor; so many tokens are the prompt."""
    logits: Tensor = _reference(family, model, folder, parts, token_ids, prompt).logits[0]
    return logits


def reference_states(
    family: Family, model: Any, folder: Path, parts: Sequence[int | Sequence[int]], token_ids: Sequence[int]
) -> Tensor:
    """``[tokens, H]``, the same after the last norm."""
    states: Tensor = _reference(family, model.model, folder, parts, token_ids, len(token_ids)).last_hidden_state[0]
    return states


def _reference(
    family: Family,
    model: Any,
    folder: Path,
    parts: Sequence[int | Sequence[int]],
    token_ids: Sequence[int],
    prompt: int,
) -> Any:
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    ids = torch.tensor([[*token_ids]])
    images = [picture(part) for part in parts if isinstance(part, int)]
    if int((ids == IMAGE).sum()) == 1:
        # Mistral 3 drops the dimension of a single vector.
        ids, images = ids.expand(2, -1), images * 2
    inputs: dict[str, Any] = {}
    if images:
        given = [images] if family.nested else images
        if family is _COHERE:
            # transformers' own needs torchvision; Normalizer has the rest.
            own = Cohere2ImageProcessor(folder)
            tiles = np.concatenate([own(image)["pixel_values"] for image in images])
            found = {"pixel_values": Normalizer(own.own, torch.device("cpu"))([tiles.astype(np.uint8)])}
        else:
            processor = AutoImageProcessor.from_pretrained(str(folder), backend="pil")
            found = processor(given, input_data_format="channels_last", return_tensors="pt", **family.options)
        inputs = {name: each for name, each in found.items() if not name.startswith("num_")}
        if family is _GEMMA:
            inputs["token_type_ids"] = (ids == IMAGE).int()
        if family.both_ways:
            inputs["token_type_ids"] = (torch.arange(ids.shape[1])[None] >= prompt).int()
        if "image_grid_thw" in inputs or "image_position_ids" in inputs:
            inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    with torch.inference_mode():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs)
