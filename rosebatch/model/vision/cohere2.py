"""Command A Vision: tiles and a thumbnail. transformers' own image processor needs torchvision; this one does not."""

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from rosebatch.model.vision.pixels import ImageProcessor
from rosebatch.model.vision.tower import TilesTower


class Cohere2ImageProcessor(ImageProcessor):
    """transformers' image processor of GOT-OCR 2, which is the same but for the number of rows and columns."""

    def __init__(self, folder: Path) -> None:
        from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil

        self.own = GotOcr2ImageProcessorPil.from_pretrained(str(folder), local_files_only=True)

    def __call__(self, rgb: NDArray[np.uint8], *, alone: bool = True, **options: Any) -> Any:
        """See ``ImageProcessor``: tiles, and the whole image behind several, all as large as a tile."""
        height, width = self.own.size["height"], self.own.size["width"]
        most = options.get("max_patches", self.own.max_patches)
        rows, columns = shape_of_tiles(rgb.shape[0] / height, rgb.shape[1] / height, most)

        def resized(rows: int, columns: int) -> NDArray[Any]:
            size = {"height": height * rows, "width": width * columns}
            found = ImageProcessor.__call__(self, rgb, size=size, crop_to_patches=False)["pixel_values"][0]
            tiles: NDArray[Any] = found.reshape(3, rows, height, columns, width)
            return tiles.transpose(1, 3, 0, 2, 4).reshape(-1, 3, height, width)

        tiles = resized(rows, columns)
        if len(tiles) > 1:
            tiles = np.concatenate((tiles, resized(1, 1)))
        return {"pixel_values": tiles, "num_patches": [len(tiles)]}


def shape_of_tiles(height: float, width: float, most: int) -> tuple[int, int]:
    """Rows and columns of the least tiles that show an image as large as it is, or as nearly so as they can.

    Args:
        height, width: of the image, in tiles.
        most: tiles.
    """
    shapes = [(rows, columns) for columns in range(1, most + 1) for rows in range(1, most // columns + 1)]
    # transformers takes the first of equals.
    scales = [(min(r / height, c / width), r, c) for r, c in sorted(shapes, key=lambda each: each[0] * each[1])]
    larger = [each for each in scales if each[0] >= 1]
    _, rows, columns = min(larger, key=lambda each: each[0]) if larger else max(scales, key=lambda each: each[0])
    return rows, columns


class Cohere2Tower(TilesTower):
    """The same with this image processor."""

    IMAGES: ClassVar[type[ImageProcessor]] = Cohere2ImageProcessor
