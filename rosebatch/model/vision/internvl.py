"""InternVL in the format of transformers: tiles of one size and a thumbnail, each of which becomes as many tokens."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rosebatch.config.model import ModelConfig
from rosebatch.model.vision.parts import load_config
from rosebatch.model.vision.pixels import ImageProcessor
from rosebatch.model.vision.tower import TilesTower
from rosebatch.model.vision.vision import Encode, Patches, Vision, token_id

# transformers' defaults.
_PLACEHOLDER = 151667
_SIDE, _MOST_TILES = 384, 12
_BEGIN, _END = "<img>", "</img>"


class InternVLProcessor:
    """transformers' image processor by Pillow, up to whole numbers.

    Args:
        folder: of the model.
        placeholder: id of the token.
        max_pixels: of the tiles of an image, but for the thumbnail; None for the model's own most tiles.
        encode: by the model's tokenizer.

    Raises:
        UserError: the tokenizer lacks tokens.
    """

    def __init__(self, folder: Path, placeholder: int, max_pixels: int | None, encode: Encode) -> None:
        self._process = ImageProcessor(folder)
        own, config = self._process.own, load_config(folder)
        sides = own.size["height"], own.size["width"]
        most = own.max_patches if max_pixels is None else min(own.max_patches, max_pixels // (sides[0] * sides[1]))
        self._most = max(most, 1)
        self._least = min(own.min_patches, self._most)
        rows, columns = (
            int(side // patch * config.downsample_ratio)
            for side, patch in zip(sides, config.vision_config.patch_size, strict=True)
        )
        self._of_tile = np.full(rows * columns, placeholder, np.uint32)
        self._begin, self._end = ([token_id(encode, name)] for name in (_BEGIN, _END))

    def __call__(self, rgb: NDArray[np.uint8], *, alone: bool = True) -> Patches:
        """See ``rosebatch.model.vision.vision.Processor``: values are ``[tiles, 3, height, width]``."""
        found = self._process(rgb, crop_to_patches=True, min_patches=self._least, max_patches=self._most)
        values = np.stack(found["pixel_values"]).astype(np.uint8)
        tiles = np.tile(self._of_tile, len(values))
        token_ids = np.concatenate((self._begin, tiles, self._end)).astype(np.uint32)
        return Patches(values, (len(values), len(self._of_tile)), token_ids)


def most_tile_pixels(values: Mapping[str, Any], max_pixels: int | None, max_tokens: int) -> int:
    """See ``MostPixels``: tiles, and a thumbnail."""
    size, most = values.get("size") or {}, values.get("max_patches", _MOST_TILES)
    tile = size.get("height", _SIDE) * size.get("width", _SIDE)
    return int((max(min(most, (max_pixels or most * tile) // tile), 1) + 1) * tile)


def internvl(folder: Path, values: Mapping[str, Any], config: ModelConfig) -> Vision:
    """Arguments as of ``rosebatch.model.vision.registry.VISIONS``."""
    placeholder = values.get("image_token_id", _PLACEHOLDER)
    processor = partial(InternVLProcessor, folder, placeholder)
    return Vision(placeholder, TilesTower.PARTS, processor, partial(TilesTower, folder), most_pixels=most_tile_pixels)
