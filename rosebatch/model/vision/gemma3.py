"""Gemma 3: all images of one size, whose tokens see each other."""

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
from rosebatch.model.vision.vision import Encode, Patches, Vision

# transformers' default.
_PLACEHOLDER = 262144
_BEGIN, _IMAGE, _END = "<start_of_image>", "<image_soft_token>", "<end_of_image>"


class Gemma3Processor:
    """transformers' image processor by Pillow, up to whole numbers, without crops of images that are not square.

    Args:
        folder: of the model.
        placeholder: id of the token.
    """

    def __init__(self, folder: Path, placeholder: int) -> None:
        self._process = ImageProcessor(folder)
        count = load_config(folder).mm_tokens_per_image
        self._token_ids = np.full(count, placeholder, np.uint32)

    def __call__(self, rgb: NDArray[np.uint8], *, alone: bool = True) -> Patches:
        """See ``rosebatch.model.vision.vision.Processor``: values are ``[1, 3, height, width]``."""
        values = np.stack(self._process(rgb, do_pan_and_scan=False)["pixel_values"]).astype(np.uint8)
        return Patches(values, (1, len(self._token_ids)), self._token_ids)


def gemma3(folder: Path, values: Mapping[str, Any], config: ModelConfig) -> Vision:
    """Arguments as of ``rosebatch.model.vision.registry.VISIONS``."""
    placeholder = values.get("image_token_id", values.get("image_token_index", _PLACEHOLDER))

    def processor(max_pixels: int | None, encode: Encode) -> Gemma3Processor:
        return Gemma3Processor(folder, placeholder)

    return Vision(
        placeholder,
        TilesTower.PARTS,
        processor,
        partial(TilesTower, folder),
        both_ways="all",
        in_text=(_BEGIN, f"\n\n{_BEGIN}{_IMAGE}{_END}\n\n"),
    )
