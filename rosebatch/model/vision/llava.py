"""LLaVA 1.5, LLaVA-NeXT (1.6) and LLaVA-OneVision: one size, or tiles of a padded image behind the whole one."""

from collections.abc import Mapping
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.model.vision.parts import load_config
from rosebatch.model.vision.pixels import ImageProcessor, require_few_pixels
from rosebatch.model.vision.pixtral import pixtral
from rosebatch.model.vision.tower import PartsTower
from rosebatch.model.vision.vision import Encode, Patches, Vision, of_one_size
from rosebatch.model.weights import WeightSource

# The vectors of a tower that are of no patch.
_EXTRA = {"clip_vision_model": 1, "siglip_vision_model": 0}
_FINEST = "anyres_max_"
# More vectors than so many times the finest are made fewer, as in transformers.
_TOLERANCE = 1.1


class LlavaProcessor:
    """transformers' image processor by Pillow, up to whole numbers. All images become as many tokens.

    Args:
        folder: of the model.
        placeholder: id of the token.
    """

    def __init__(self, folder: Path, placeholder: int) -> None:
        self._process, self._placeholder = ImageProcessor(folder), placeholder
        config = load_config(folder)
        self._side = config.vision_config.patch_size
        self._extra = _EXTRA[config.vision_config.model_type] - (config.vision_feature_select_strategy == "default")

    def __call__(self, rgb: NDArray[np.uint8], *, alone: bool = True) -> Patches:
        """See ``rosebatch.model.vision.vision.Processor``: values are ``[1, 3, height, width]``."""
        short, long = sorted(rgb.shape[:2])
        if self._process.own.do_pad:
            require_few_pixels(rgb, long**2)
        elif (edge := self._process.own.size.shortest_edge) is not None:
            require_few_pixels(rgb, edge**2 * long / short)
        values = np.stack(self._process(rgb)["pixel_values"]).astype(np.uint8)
        count = (values.shape[2] // self._side) * (values.shape[3] // self._side) + self._extra
        return Patches(values, (1, count), np.full(count, self._placeholder, np.uint32))


class LlavaTilesProcessor:
    """The same of LLaVA-NeXT and LLaVA-OneVision. Tiles are put together again, and what is padding is left out.

    Args:
        folder: of the model.
        placeholder: id of the token.
        max_pixels: of the tiles of an image, but for the whole one; None for the model's own.
    """

    def __init__(self, folder: Path, placeholder: int, max_pixels: int | None) -> None:
        self._process, self._placeholder = ImageProcessor(folder), placeholder
        config = load_config(folder)
        shapes = self._process.own.image_grid_pinpoints
        most = max(max_pixels or 0, min(h * w for h, w in shapes))
        self._shapes = [[h, w] for h, w in shapes if max_pixels is None or h * w <= most]
        self._tile = config.vision_config.image_size
        self._side = self._tile // config.vision_config.patch_size
        # LLaVA-OneVision has a limit, and of several images sees each as one tile.
        limit = getattr(config, "vision_aspect_ratio", None)
        self._finest = None if limit is None else int(limit.removeprefix(_FINEST)) * self._side**2

    def __call__(self, rgb: NDArray[np.uint8], *, alone: bool = True) -> Patches:
        """See ``rosebatch.model.vision.vision.Processor``: values are ``[tiles, 3, side, side]``, the whole first."""
        height, width, _ = rgb.shape
        alone = alone or self._finest is None
        if not alone:
            require_few_pixels(rgb, max(height, width) ** 2)
        found = self._process(rgb, alone=alone, image_grid_pinpoints=self._shapes)
        values = np.stack(found["pixel_values"][0]).astype(np.uint8)
        rows, columns = self._unpadded(height, width) if alone else (1, 0)
        count = self._side**2 + rows * (columns + 1)
        grid = (height, width) if alone else (1, count)
        return Patches(values, grid, np.full(count, self._placeholder, np.uint32))

    def _unpadded(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of the vectors that are no padding, each row with one more vector behind it."""
        from transformers.image_processing_utils import select_best_resolution

        best = select_best_resolution((height, width), self._shapes)
        rows, columns = (each // self._tile * self._side for each in best)
        # As transformers rounds.
        if width / height > columns / rows:
            rows -= (rows - int(round(height * (columns / width), 7))) // 2 * 2
        else:
            columns -= (columns - int(round(width * (rows / height), 7))) // 2 * 2
        if self._finest is not None and (ratio := sqrt(rows * columns / self._finest)) > _TOLERANCE:
            rows, columns = int(rows // ratio), int(columns // ratio)
        return rows, columns


class LlavaTilesTower(PartsTower):
    """All tiles of an image together."""

    PARTS: ClassVar = (*PartsTower.PARTS, "image_newline")

    def __init__(self, folder: Path, weights: WeightSource) -> None:
        super().__init__(folder, weights)
        self._shapes = ImageProcessor(folder).own.image_grid_pinpoints

    def arguments(self, pixels: Tensor, grid: tuple[int, int]) -> dict[str, Any]:
        """See ``PartsTower``."""
        if len(pixels) == 1:
            # Some number of images above one: then none of them has tiles.
            return {"pixel_values": pixels, "image_sizes": [grid], "batch_num_images": [2]}
        # The tiles have the best of all shapes that were allowed, so the best of those with as many tiles.
        size = (len(pixels) - 1) * pixels.shape[2] * pixels.shape[3]
        self._whole.config.image_grid_pinpoints = [[h, w] for h, w in self._shapes if h * w == size]
        return {"pixel_values": pixels, "image_sizes": [grid]}


def llava(folder: Path, values: Mapping[str, Any], config: ModelConfig) -> Vision | None:
    """LLaVA 1.5, and Pixtral, which has its class; arguments as of ``rosebatch.model.vision.registry.VISIONS``."""
    kind = values["vision_config"]["model_type"]
    if kind not in _EXTRA:
        return pixtral(folder, values, config)
    placeholder = _placeholder(values, 32000)

    def processor(max_pixels: int | None, encode: Encode) -> LlavaProcessor:
        return LlavaProcessor(folder, placeholder)

    return Vision(placeholder, PartsTower.PARTS, processor, partial(PartsTower, folder))


def llava_next(folder: Path, values: Mapping[str, Any], config: ModelConfig) -> Vision:
    """LLaVA-NeXT; arguments as of ``rosebatch.model.vision.registry.VISIONS``."""
    return _with_tiles(folder, _placeholder(values, 32000))


def llava_onevision(folder: Path, values: Mapping[str, Any], config: ModelConfig) -> Vision:
    """LLaVA-OneVision; arguments as of ``rosebatch.model.vision.registry.VISIONS``."""
    return _with_tiles(folder, _placeholder(values, 151646))


def _placeholder(values: Mapping[str, Any], default: int) -> int:
    found: int = values.get("image_token_id", values.get("image_token_index", default))
    return found


def _with_tiles(folder: Path, placeholder: int) -> Vision:
    def processor(max_pixels: int | None, encode: Encode) -> LlavaTilesProcessor:
        return LlavaTilesProcessor(folder, placeholder, max_pixels)

    tower = partial(LlavaTilesTower, folder)
    return Vision(placeholder, LlavaTilesTower.PARTS, processor, tower, most_pixels=_most_pixels)


def _most_pixels(values: Mapping[str, Any], max_pixels: int | None, max_tokens: int) -> int:
    """See ``MostPixels``: tiles, and the whole image."""
    sizes = [height * width for height, width in values["image_grid_pinpoints"]]
    fitting = [each for each in sizes if max_pixels is None or each <= max_pixels]
    return int(max(fitting, default=min(sizes)) + of_one_size(values, max_pixels, max_tokens))
