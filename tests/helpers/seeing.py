"""Tiny random models that see, their images, and what transformers makes of both."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from rosebatch.core.images import PromptImage
from rosebatch.core.request import Request
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
    """

    tokens: tuple[str, ...]
    in_template: str
    processor: dict[str, Any]
    tower: dict[str, Any]
    options: dict[str, Any] = {}
    own: dict[str, Any] = {}


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
FAMILIES = {
    "Idefics3ForConditionalGeneration": _SMOLVLM._replace(
        processor=_SMOLVLM.processor | {"image_processor_type": "Idefics3ImageProcessorFast"}
    ),
    "InternVLForConditionalGeneration": _INTERNVL,
    "LlavaForConditionalGeneration": _PIXTRAL,
    "Mistral3ForConditionalGeneration": _MISTRAL,
    "Qwen2_5_VLForConditionalGeneration": _QWEN,
    "Qwen3VLForConditionalGeneration": _QWEN,
    "Qwen3VLMoeForConditionalGeneration": _QWEN,
    "Qwen3_5ForConditionalGeneration": _QWEN,
    "Qwen3_5MoeForConditionalGeneration": _QWEN,
    "SmolVLMForConditionalGeneration": _SMOLVLM,
}


def seeing_model(name: str, folder: Path) -> Any:
    """A random model of a class, written into a folder, with its image processor and tokenizer."""
    family = FAMILIES[name]
    own = {"image_token_id": IMAGE, "image_token_index": IMAGE}
    own |= {"vision_start_token_id": FIRST_MARK, "vision_end_token_id": SECOND_MARK}
    # Behind a window, fewer blocks than a prompt's preempt nothing.
    text = {"vocab_size": 264, "sliding_window": None}
    model = tiny_whole(name, others=family.tower, own=own | family.own, **text)
    # transformers takes one that was generated for an image.
    torch.nn.init.zeros_(model.lm_head.weight[IMAGE])
    (folder / "preprocessor_config.json").write_text(json.dumps(family.processor | _COLOURS))
    backend = byte_backend()
    backend.add_special_tokens(list(family.tokens))
    template = _TEMPLATE.replace("IMAGE", family.in_template)
    save_backend(backend, folder, chat_template=template, eos_token="<eos>")
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
    before, _, after = family.in_template.partition(family.tokens[0])
    ids = {token: IMAGE + number for number, token in enumerate(family.tokens)}
    token_ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            patches = processor(picture(part))
            token_ids += [ids[before]] if before else []
            gets_vector = patches.token_ids == IMAGE
            images.append(PromptImage(len(token_ids), gets_vector, patches.grid, bytes([part]) * 32, patches.values))
            token_ids += patches.token_ids.tolist()
            token_ids += [ids[after]] if after else []
        else:
            token_ids += part
    return Request(id, tuple(token_ids), images=tuple(images), **options)


def reference_logits(
    family: Family, model: Any, folder: Path, parts: Sequence[int | Sequence[int]], token_ids: Sequence[int]
) -> Tensor:
    """``[tokens, V]`` of transformers, with images by its own image processor."""
    logits: Tensor = _reference(family, model, folder, parts, token_ids).logits[0]
    return logits


def reference_states(
    family: Family, model: Any, folder: Path, parts: Sequence[int | Sequence[int]], token_ids: Sequence[int]
) -> Tensor:
    """``[tokens, H]``, the same after the last norm."""
    states: Tensor = _reference(family, model.model, folder, parts, token_ids).last_hidden_state[0]
    return states


def _reference(
    family: Family, model: Any, folder: Path, parts: Sequence[int | Sequence[int]], token_ids: Sequence[int]
) -> Any:
    from transformers.models.auto.image_processing_auto import AutoImageProcessor

    ids = torch.tensor([[*token_ids]])
    images = [picture(part) for part in parts if isinstance(part, int)]
    if int((ids == IMAGE).sum()) == 1:
        # Mistral 3 drops the dimension of a single vector.
        ids, images = ids.expand(2, -1), images * 2
    inputs: dict[str, Any] = {}
    if images:
        processor = AutoImageProcessor.from_pretrained(str(folder), backend="pil")
        found = processor(images, input_data_format="channels_last", return_tensors="pt", **family.options)
        inputs = {name: each for name, each in found.items() if name != "num_patches"}
        if "image_grid_thw" in inputs:
            inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    with torch.inference_mode():
        return model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs)
