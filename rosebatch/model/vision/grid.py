"""Families whose images have any shape: patches and grids, and transformers' function that makes vectors of both.

What differs of a family is a line of ``GRIDS``. Towers of Qwen's kind, whose layers are replaced, are in
``rosebatch.model.vision.qwen_vl``.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.core.images import PromptImage
from rosebatch.model.hf.rope import rope_members
from rosebatch.model.vision.parts import load_config, load_parts
from rosebatch.model.vision.patch_product import PatchProduct
from rosebatch.model.vision.pixels import ImageProcessor, Normalizer, send
from rosebatch.model.vision.qwen_vl import QwenProcessor, in_runs, most_grid_pixels
from rosebatch.model.vision.vision import Encode, Vision
from rosebatch.model.weights import WeightSource


class Grid(NamedTuple):
    """What transformers does not say of a family; see ``Vision``.

    Attributes:
        parts: of transformers' model.
        sections: default numbers of channel pairs that time, height and width turn, or other positions; empty if
            positions of images are those of their tokens.
        most_pixels: default of the image processor.
        frames: equal pictures of an image, whose pixels all count there.
        framed: see ``QwenProcessor``.
        flat: whether the pixels of a patch are one dimension.
        former: see ``load_parts``.
    """

    parts: tuple[str, ...] = ("visual",)
    sections: tuple[int, ...] = ()
    most_pixels: int = 28 * 28 * 1280
    frames: int = 1
    framed: bool = False
    flat: bool = True
    former: tuple[str, ...] = ()


_GLM4V = Grid(sections=(8, 12, 12), most_pixels=28 * 28 * 15000, frames=2)
# By transformers' class.
GRIDS = {
    "Glm46VForConditionalGeneration": _GLM4V,
    "Glm4vForConditionalGeneration": _GLM4V,
    "Glm4vMoeForConditionalGeneration": _GLM4V,
    "GlmOcrForConditionalGeneration": _GLM4V,
    "HunYuanVLForConditionalGeneration": Grid(
        ("vision_tower",), (16, 16, 16, 16), most_pixels=2048**2, framed=True, former=("vit",)
    ),
    "HyperCLOVAXVisionV2ForConditionalGeneration": Grid(("vision_model", "projector"), former=("vision_projector",)),
    "PaddleOCRVLForConditionalGeneration": Grid(
        ("visual", "projector"), (16, 24, 24), most_pixels=1536**2, flat=False, former=("mlp_AR",)
    ),
    "VideoLlama3ForConditionalGeneration": Grid(("vision_model", "projector")),
}


class GridTower:
    """transformers' own tower and projector, by its own function for both: images of a step together.

    Args:
        folder: of the model.
        grid: of its family.
        weights: of the model.
    """

    def __init__(self, folder: Path, grid: Grid, weights: WeightSource) -> None:
        self._whole = load_parts(load_config(folder), weights, grid.parts, grid.former)
        for module in list(self._whole.modules()):
            if isinstance(product := getattr(module, "proj", None), torch.nn.Conv3d):
                module.proj = PatchProduct(product)
        own = ImageProcessor(folder).own
        self._device = next(getattr(self._whole, grid.parts[0]).parameters()).device
        self._merge, self._frames, self._flat = own.merge_size, own.temporal_patch_size, grid.flat
        self._normalize, self._names = Normalizer(own, self._device), own.model_input_names

    def __call__(self, images: Sequence[PromptImage]) -> Sequence[Tensor]:
        """See ``rosebatch.model.vision.vision.Tower``: patches are ``[patches, 3, size, size]``."""
        pixels = self._normalize([each.patches for each in images])
        if self._flat:
            pixels = pixels[:, :, None].expand(-1, -1, self._frames, -1, -1).flatten(1)
        shapes = send([np.array([[1, *(side * self._merge for side in each.grid)] for each in images])], self._device)
        given = {"pixel_values": pixels, "image_grid_thw": shapes}
        if "image_merge_sizes" in self._names:
            # Images and videos may be merged differently.
            given["image_merge_sizes"] = torch.full_like(shapes[:, 0], self._merge)
        found = self._whole.get_image_features(**given, return_dict=True)
        return [vectors[None] for vectors in found.pooler_output]


def grid(folder: Path, values: Mapping[str, Any], config: ModelConfig) -> Vision:
    """Arguments as of ``rosebatch.model.vision.registry.VISIONS``."""
    own, whole = GRIDS[values["architectures"][0]], load_config(folder)
    text = values.get("text_config") or values
    members = rope_members(text)
    stored = members.get("mrope_section") or members.get("xdrope_section") or own.sections
    if len(stored) != len(own.sections):
        raise ValueError(f"there are {len(stored)} sections, {len(own.sections)} are served")
    # transformers' code counts them itself.
    pairs = config.rotary_size // 2 if config.transformers is None else sum(stored)

    merged = getattr(whole.vision_config, "spatial_merge_size", 1) ** 2

    def processor(max_pixels: int | None, encode: Encode) -> QwenProcessor:
        return QwenProcessor(folder, whole.image_token_id, max_pixels, own.frames, framed=own.framed)

    return Vision(
        whole.image_token_id,
        own.parts + own.former,
        processor,
        partial(GridTower, folder, own),
        in_runs(stored, pairs) if own.sections else (),
        partial(most_grid_pixels, default=own.most_pixels, frames=own.frames),
        merged // 2 if own.framed else merged,
    )
