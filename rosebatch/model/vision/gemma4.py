"""Gemma 4: images of any shape. A square of patches becomes a token. In some models these see each other."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.model.vision.parts import load_config
from rosebatch.model.vision.pixels import ImageProcessor
from rosebatch.model.vision.tower import PartsTower
from rosebatch.model.vision.vision import Encode, Patches, Vision
from rosebatch.model.weights import WeightSource

# Most tokens of an image that transformers allows, as models were trained.
_BUDGETS = (70, 140, 280, 560, 1120)


class Gemma4Processor:
    """transformers' image processor by Pillow, up to patches of whole numbers.

    Args:
        folder: of the model.
        max_pixels: of an image that is resized; None for the model's own.
    """

    def __init__(self, folder: Path, max_pixels: int | None) -> None:
        self._process = ImageProcessor(folder)
        own, config = self._process.own, load_config(folder)
        pixels = (own.pooling_kernel_size * own.patch_size) ** 2
        fitting = [each for each in _BUDGETS if max_pixels is None or each * pixels <= max_pixels]
        self._budget = min(own.max_soft_tokens, max(fitting, default=_BUDGETS[0]))
        self._begin, self._image, self._end = config.boi_token_id, config.image_token_id, config.eoi_token_id

    def __call__(self, rgb: NDArray[np.uint8], *, alone: bool = True) -> Patches:
        """See ``rosebatch.model.vision.vision.Processor``: values are ``[patches, size, size, 3]``, row by row."""
        own, found = self._process.own, self._process(rgb, max_soft_tokens=self._budget)
        count, pooled = int(found["num_soft_tokens_per_image"][0]), own.pooling_kernel_size
        values = found["pixel_values"][0][: count * pooled**2].astype(np.uint8)
        columns = int(found["image_position_ids"][0][:, 0].max() + 1) // pooled
        token_ids = np.array([self._begin, *[self._image] * count, self._end], np.uint32)
        return Patches(values.reshape(-1, own.patch_size, own.patch_size, 3), (count // columns, columns), token_ids)


class Gemma4Tower(PartsTower):
    """Patches without padding."""

    PARTS: ClassVar = ("vision_tower", "embed_vision")

    def __init__(self, folder: Path, weights: WeightSource) -> None:
        super().__init__(folder, weights)
        self._pooled = ImageProcessor(folder).own.pooling_kernel_size

    def vectors(self, values: Sequence[NDArray[np.uint8]], grid: tuple[int, int]) -> Tensor:
        """See ``PartsTower``."""
        return super().vectors([each.transpose(0, 3, 1, 2) for each in values], grid)

    def arguments(self, pixels: Tensor, grid: tuple[int, int]) -> dict[str, Any]:
        """See ``PartsTower``."""
        rows, columns = (torch.arange(each * self._pooled, device=pixels.device) for each in grid)
        places = torch.cartesian_prod(rows, columns).flip(1)
        return {"pixel_values": pixels.permute(0, 2, 3, 1).flatten(1)[None], "image_position_ids": places[None]}


def gemma4(folder: Path, values: Mapping[str, Any], config: ModelConfig) -> Vision | None:
    """Arguments as of ``rosebatch.model.vision.registry.VISIONS``; None without a tower."""
    if not values.get("vision_config"):
        return None
    both_ways = values["text_config"].get("use_bidirectional_attention") == "vision"

    def processor(max_pixels: int | None, encode: Encode) -> Gemma4Processor:
        return Gemma4Processor(folder, max_pixels)

    return Vision(
        values.get("image_token_id", 258880),
        Gemma4Tower.PARTS,
        processor,
        partial(Gemma4Tower, folder),
        most_pixels=_most_pixels,
        both_ways="windows" if both_ways else "",
    )


def _most_pixels(values: Mapping[str, Any], max_pixels: int | None, max_tokens: int) -> int:
    """See ``MostPixels``: a lower budget of tokens than the largest counts as that."""
    side = values.get("pooling_kernel_size", 3) * values.get("patch_size", 16)
    return int(values.get("max_soft_tokens", 280) * side**2)
