"""Tiny random models that see, their images, and what transformers makes of both."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rosebatch.core.images import PromptImage
from rosebatch.core.request import Request
from rosebatch.model.vision.vision import Processor
from tests.helpers.byte_tokenizer import byte_backend, save_backend
from tests.helpers.wholes import save, tiny_whole

# After the bytes and the end token of the tokenizer.
IMAGE, START, END = 257, 258, 259
TEMPLATE = """
{%- for message in messages -%}
[{{ message.role }}:
{%- if message.content is string -%}{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}
{%- endif -%}]
{%- endfor -%}
[assistant:"""
# Height and width. The first become 4 x 4 tokens; one has fewer pixels than a patch, and three rows are no channels.
SIZES = ((32, 32), (32, 32), (72, 24), (3, 60), (1, 1))
_TOWER = {"patch_size": 4, "temporal_patch_size": 2, "spatial_merge_size": 2, "depth": 3}
_PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 256, "longest_edge": 2048},
    "image_mean": [0.4, 0.5, 0.6],
    "image_std": [0.3, 0.25, 0.2],
}


def seeing_model(name: str, folder: Path) -> Any:
    """A random model of a class, written into a folder, with its image processor and tokenizer."""
    model = tiny_whole(
        name,
        vocab_size=264,
        others={**_TOWER, "deepstack_visual_indexes": [0, 2], "fullatt_block_indexes": [1], "window_size": 16},
        marks={"image_token_id": IMAGE, "vision_start_token_id": START, "vision_end_token_id": END},
    )
    # transformers takes one that was generated for an image.
    torch.nn.init.zeros_(model.lm_head.weight[IMAGE])
    (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR))
    backend = byte_backend()
    backend.add_special_tokens(["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"])
    save_backend(backend, folder, chat_template=TEMPLATE, eos_token="<eos>")
    return save(model, folder)


def picture(number: int) -> np.ndarray:
    """Random pixels of the size of this number; those of equal numbers are equal."""
    height, width = SIZES[number]
    return np.random.default_rng(number).integers(0, 256, (height, width, 3), dtype=np.uint8)


def request(processor: Processor, id: int, parts: Sequence[int | Sequence[int]], **options: Any) -> Request:
    """A prompt of parts: token ids, or the number of an image."""
    token_ids: list[int] = []
    images = []
    for part in parts:
        if isinstance(part, int):
            patches = processor(picture(part))
            count = patches.grid[0] * patches.grid[1]
            token_ids.append(START)
            digest = bytes([part]) * 32
            images.append(PromptImage(len(token_ids), count, patches.grid, digest, patches.values))
            token_ids += [IMAGE] * count + [END]
        else:
            token_ids += part
    return Request(id, tuple(token_ids), images=tuple(images), **options)


def reference_logits(
    model: Any, folder: Path, parts: Sequence[int | Sequence[int]], token_ids: Sequence[int]
) -> Tensor:
    """``[tokens, V]`` of transformers, with images by its own image processor."""
    from transformers import AutoImageProcessor

    ids = torch.tensor([[*token_ids]])
    inputs: dict[str, Any] = {}
    if images := [picture(part) for part in parts if isinstance(part, int)]:
        processor = AutoImageProcessor.from_pretrained(str(folder), backend="pil")
        inputs = dict(processor(images, input_data_format="channels_last", return_tensors="pt"))
        inputs["mm_token_type_ids"] = (ids == IMAGE).int()
    with torch.inference_mode():
        logits: Tensor = model(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs).logits[0]
    return logits
