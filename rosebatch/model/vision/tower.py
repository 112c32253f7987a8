"""Towers whose vectors a projector fits to the text part, as most models have them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rosebatch.core.images import PromptImage
from rosebatch.model.vision.parts import load_config, load_parts
from rosebatch.model.vision.pixels import ImageProcessor, Normalizer
from rosebatch.model.weights import WeightSource


class PartsTower:
    """transformers' own tower and projector, by its own function for both.

    Args:
        folder: of the model.
        weights: of the model.
        former: see ``load_parts``.
    """

    PARTS: ClassVar[tuple[str, ...]] = ("vision_tower", "multi_modal_projector")
    IMAGES: ClassVar[type[ImageProcessor]] = ImageProcessor

    def __init__(self, folder: Path, weights: WeightSource, former: Sequence[str] = ()) -> None:
        self._whole = load_parts(load_config(folder), weights, self.PARTS, former)
        device = next(getattr(self._whole, self.PARTS[0]).parameters()).device
        self._normalize = Normalizer(self.IMAGES(folder).own, device)

    def __call__(self, images: Sequence[PromptImage]) -> Sequence[Tensor]:
        """See ``rosebatch.model.vision.vision.Tower``; patches are ``[tiles, 3, height, width]``."""
        return [self.vectors([each.patches], each.grid) for each in images]

    def vectors(self, values: Sequence[NDArray[np.uint8]], grid: tuple[int, int]) -> Tensor:
        """``[1, vectors, H]``, of an image or of all tiles together, one array after the other."""
        arguments = self.arguments(self._normalize(values), grid)
        found = self._whole.get_image_features(**arguments, return_dict=True)
        vectors = found.pooler_output
        # One for each image or tile, or one of all.
        is_flat = isinstance(vectors, Tensor) and vectors.ndim == 2
        return (vectors if is_flat else torch.cat(tuple(vectors)))[None]

    def arguments(self, pixels: Tensor, grid: tuple[int, int]) -> dict[str, Any]:
        """Of transformers' function, for an image that is normalised."""
        return {"pixel_values": pixels}


class TilesTower(PartsTower):
    """The same for tiles of one size. Each is encoded for itself, so those of several images go together."""

    def __call__(self, images: Sequence[PromptImage]) -> Sequence[Tensor]:
        """See ``rosebatch.model.vision.vision.Tower``."""
        tiles, of_tile = [each.grid[0] for each in images], images[0].grid[1]
        found = self.vectors([each.patches for each in images], (sum(tiles), of_tile))
        return torch.split(found, [each * of_tile for each in tiles], 1)
