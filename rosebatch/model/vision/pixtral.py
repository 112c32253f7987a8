"""Images of Pixtral, Mistral 3 and LightOnOCR: rows of patches. In the first two, a token follows each row."""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.model.vision.parts import load_config
from rosebatch.model.vision.pixels import ImageProcessor
from rosebatch.model.vision.tower import PartsTower
from rosebatch.model.vision.vision import Encode, Patches, Vision, token_id

# transformers' default of Mistral 3; of other models, config.json says it.
_PLACEHOLDER = 10
_LONGEST = 1024
_ROW_END, _IMAGE_END = "[IMG_BREAK]", "[IMG_END]"


class PixtralProcessor:
    """transformers' image processor by Pillow, up to whole numbers.

    Args:
        folder: of the model.
        placeholder: id of the token.
        max_pixels: of an image that is resized; None for the model's own.
        encode: by the model's tokenizer.

    Raises:
        UserError: the tokenizer lacks tokens.
    """

    def __init__(self, folder: Path, placeholder: int, max_pixels: int | None, encode: Encode) -> None:
        self._process, self._max_pixels = ImageProcessor(folder), max_pixels
        self._side = _side(load_config(folder))
        # Edges are rounded up to multiples of it.
        self._patch: Any = {"height": self._side, "width": self._side}
        self._placeholder = placeholder
        self._marks = self._find_marks(encode)

    def __call__(self, rgb: NDArray[np.uint8], *, alone: bool = True) -> Patches:
        """See ``rosebatch.model.vision.vision.Processor``: values are ``[1, 3, height, width]``."""
        height, width, _ = rgb.shape
        longest = self._longest_edge(height, width)
        if longest * min(height, width) < max(height, width):
            raise ValueError(
                f"of {width} by {height} pixels, no shorter side is left where the longer one is {longest}"
            )
        found = self._process(rgb, patch_size=self._patch, size={"longest_edge": longest})
        values = np.stack(found["pixel_values"]).astype(np.uint8)
        rows, columns = (each // self._side for each in values.shape[2:])
        if not rows * columns:
            raise ValueError(f"of {width} by {height} pixels, there is no square of {self._side} pixels a side")
        token_ids = np.full((rows, columns + len(self._marks[:1])), self._placeholder, np.uint32)
        if self._marks:
            token_ids[:, -1], token_ids[-1, -1] = self._marks
        return Patches(values, (rows, columns), token_ids.ravel())

    def _find_marks(self, encode: Encode) -> tuple[int, ...]:
        """The token after each row, and the one after the last."""
        return token_id(encode, _ROW_END), token_id(encode, _IMAGE_END)

    def _longest_edge(self, height: int, width: int) -> int:
        """Of an image that is resized."""
        longest = int(self._process.own.size["longest_edge"])
        if self._max_pixels is None or height * width <= self._max_pixels:
            return longest
        edge = int(max(height, width) * (self._max_pixels / (height * width)) ** 0.5)
        # Both edges are rounded up to whole patches.
        return min(longest, max(edge - edge % self._side, self._side))


class LightOnOcrProcessor(PixtralProcessor):
    """The same without tokens after rows. Edges are rounded to patches, and what is merged of them rounds down."""

    def __init__(self, folder: Path, placeholder: int, max_pixels: int | None, encode: Encode) -> None:
        super().__init__(folder, placeholder, max_pixels, encode)
        self._patch = self._process.own.patch_size

    def _find_marks(self, encode: Encode) -> tuple[int, ...]:
        return ()


class PixtralTower(PartsTower):
    """Images of any shape, each alone: several would attend to all patches under a mask."""

    def vectors(self, values: Sequence[NDArray[np.uint8]], grid: tuple[int, int]) -> Tensor:
        """See ``PartsTower``."""
        return super().vectors(values, grid)[:, : grid[0] * grid[1]]

    def arguments(self, pixels: Tensor, grid: tuple[int, int]) -> dict[str, Any]:
        """See ``PartsTower``."""
        if grid == (1, 1):
            # transformers drops the dimension of a single vector: the image is there twice.
            pixels = pixels.expand(2, -1, -1, -1)
        return {"pixel_values": pixels, "image_sizes": [tuple(pixels.shape[2:])] * len(pixels)}


class LightOnOcrTower(PixtralTower):
    """The same with other names."""

    PARTS: ClassVar = ("vision_encoder", "vision_projection")


def lighton_ocr(folder: Path, values: Mapping[str, Any], config: ModelConfig) -> Vision:
    """LightOnOCR; arguments as of ``rosebatch.model.vision.registry.VISIONS``."""
    placeholder = values.get("image_token_id", 151655)
    processor = partial(LightOnOcrProcessor, folder, placeholder)
    tower = partial(LightOnOcrTower, folder)
    return Vision(placeholder, LightOnOcrTower.PARTS, processor, tower, most_pixels=_most_pixels)


def pixtral(folder: Path, values: Mapping[str, Any], config: ModelConfig) -> Vision | None:
    """Arguments as of ``rosebatch.model.vision.registry.VISIONS``; None if the tower is another one."""
    if values["vision_config"]["model_type"] != "pixtral":
        return None
    placeholder = values.get("image_token_id", values.get("image_token_index", _PLACEHOLDER))
    processor = partial(PixtralProcessor, folder, placeholder)
    return Vision(placeholder, PartsTower.PARTS, processor, partial(PixtralTower, folder), most_pixels=_most_pixels)


def _most_pixels(values: Mapping[str, Any], max_pixels: int | None, max_tokens: int) -> int:
    """See ``MostPixels``; sides are rounded up to whole patches."""
    longest = (values.get("size") or {}).get("longest_edge", _LONGEST)
    return int(min(longest**2, max_pixels or longest**2))


def _side(config: Any) -> int:
    """Pixels of a token's square: patches that are merged, in Mistral 3."""
    return int(config.vision_config.patch_size * getattr(config, "spatial_merge_size", 1))
