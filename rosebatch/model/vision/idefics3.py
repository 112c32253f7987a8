"""Idefics 3 and SmolVLM: tiles of one size and the whole image, each behind tokens that say which one it is."""

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.model.vision.parts import load_config
from rosebatch.model.vision.pixels import ImageProcessor
from rosebatch.model.vision.tower import TilesTower
from rosebatch.model.vision.vision import Encode, Patches, Vision, token_id

# transformers' defaults.
_SIDE, _LONGEST = 364, 4 * 364
_IMAGE, _AROUND, _WHOLE = "<image>", "<fake_token_around_image>", "<global-img>"


class Idefics3Processor:
    """transformers' image processor by Pillow, up to whole numbers.

    Args:
        folder: of the model.
        placeholder: id of the token.
        max_pixels: of the tiles of an image, but for the whole one; None for the model's own.
        encode: by the model's tokenizer.

    Raises:
        UserError: the tokenizer lacks tokens.
    """

    def __init__(self, folder: Path, placeholder: int, max_pixels: int | None, encode: Encode) -> None:
        self._process, self._max_pixels, self._encode = ImageProcessor(folder), max_pixels, encode
        for name in (_IMAGE, _AROUND):
            token_id(encode, name)
        config = load_config(folder)
        self._side = int(self._process.own.max_image_size["longest_edge"])
        self._of_tile = (self._side // config.vision_config.patch_size // config.scale_factor) ** 2

    def __call__(self, rgb: NDArray[np.uint8]) -> Patches:
        """See ``rosebatch.model.vision.vision.Processor``: values are ``[tiles, 3, height, width]``."""
        size = {"longest_edge": self._longest_edge(*rgb.shape[:2])}
        found = self._process(rgb, size=size, return_row_col_info=True)
        values = np.stack(found["pixel_values"][0]).astype(np.uint8)
        text = self._text(found["rows"][0][0], found["cols"][0][0])
        return Patches(values, (len(values), self._of_tile), np.array(self._encode(text), np.uint32))

    def _text(self, rows: int, columns: int) -> str:
        """What transformers' processor writes for an image: line breaks behind it may be one token."""
        vectors = _IMAGE * self._of_tile
        tiles = "".join(
            "".join(f"{_AROUND}<row_{row + 1}_col_{column + 1}>{vectors}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        between = "\n" if tiles else ""
        return f"{tiles}{between}{_AROUND}{_WHOLE}{vectors}{_AROUND}"

    def _longest_edge(self, height: int, width: int) -> int:
        """Of an image that is resized: small ones are made larger."""
        longest = int(self._process.own.size["longest_edge"])
        if self._max_pixels is None:
            return longest
        short, long = sorted((height, width))
        tiles = max(longest // self._side, 1)
        while tiles > 1 and tiles * -(-tiles * short // long) * self._side**2 > self._max_pixels:
            tiles -= 1
        return min(longest, tiles * self._side)


class Idefics3Tower(TilesTower):
    """transformers takes tiles as the images of a row."""

    PARTS: ClassVar = ("vision_model", "connector")

    def arguments(self, pixels: Tensor, grid: tuple[int, int]) -> dict[str, Any]:
        """See ``PartsTower``."""
        return {"pixel_values": pixels[None]}


def _most_pixels(values: Mapping[str, Any], max_pixels: int | None, max_tokens: int) -> int:
    """See ``MostPixels``: tiles, and the whole image."""
    side = (values.get("max_image_size") or {}).get("longest_edge", _SIDE)
    longest = (values.get("size") or {}).get("longest_edge", _LONGEST)
    # A side is rounded up to whole tiles.
    tiles = (-(-longest // side)) ** 2
    return int((max(min(tiles, (max_pixels or tiles * side**2) // side**2), 1) + 1) * side**2)


def idefics3(folder: Path, values: Mapping[str, Any], config: ModelConfig) -> Vision:
    """Arguments as of ``rosebatch.model.vision.registry.VISIONS``."""
    placeholder = values["image_token_id"]
    processor = partial(Idefics3Processor, folder, placeholder)
    return Vision(placeholder, Idefics3Tower.PARTS, processor, partial(Idefics3Tower, folder), most_pixels=_most_pixels)
