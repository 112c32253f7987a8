"""Families whose images have one size or come in tiles, and whose texts for an image transformers writes."""

from collections.abc import Mapping
from functools import partial
from importlib.metadata import version
from inspect import signature
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.host.model_files import read_json
from rosebatch.model.vision.cohere2 import Cohere2Tower
from rosebatch.model.vision.internvl import most_tile_pixels
from rosebatch.model.vision.memory import ACTIVATIONS
from rosebatch.model.vision.parts import load_config
from rosebatch.model.vision.pixels import ImageProcessor, require_few_pixels
from rosebatch.model.vision.tower import TilesTower
from rosebatch.model.vision.vision import BothWays, Encode, MostPixels, Patches, Sight, Vision, of_one_size


class AlignerTower(TilesTower):
    """The same with other names."""

    PARTS: ClassVar = ("vision_model", "aligner")


class PageTower(TilesTower):
    """The same where transformers does not convert pixels."""

    def arguments(self, pixels: Tensor, grid: tuple[int, int]) -> dict[str, Any]:
        """See ``PartsTower``."""
        return {"pixel_values": pixels.to(self._whole.dtype)}


class Processed(NamedTuple):
    """What transformers does not say of a family; see ``Vision``, and ``load_parts`` of ``former``."""

    tower: type[TilesTower] = TilesTower
    most_pixels: MostPixels = of_one_size
    in_text: tuple[str, str] | None = None
    former: tuple[str, ...] = ()
    both_ways: BothWays = ""
    activations: int = ACTIVATIONS


# Of transformers. Processors of 5.10 write other texts.
_OLDEST = 5, 24
# By transformers' class. The image function takes pixels alone, and its vectors take the place of embeddings: no more.
PROCESSED = {
    "AyaVisionForConditionalGeneration": Processed(most_pixels=most_tile_pixels, in_text=("<image>", "<|IMG_PATCH|>")),
    "Cohere2VisionForConditionalGeneration": Processed(Cohere2Tower, most_tile_pixels),
    "DeepseekVLForConditionalGeneration": Processed(AlignerTower),
    # Its layers add numbers for all pairs of patches: 211 values in fp32, 420 in bf16.
    "GotOcr2ForConditionalGeneration": Processed(PageTower, activations=440),
    "JanusForConditionalGeneration": Processed(AlignerTower),
    "PaliGemmaForConditionalGeneration": Processed(both_ways="prompt"),
    "QianfanOCRForConditionalGeneration": Processed(
        most_pixels=most_tile_pixels, in_text=("<image>", "<IMG_CONTEXT>"), former=("vision_model", "mlp1")
    ),
    "VipLlavaForConditionalGeneration": Processed(),
}


class TextProcessor:
    """transformers' image processor by Pillow, up to whole numbers, and its processor of the whole model for the text.

    Args:
        folder: of the model.
        max_pixels: of the tiles of an image, but for the whole one; None for the model's own most tiles.
        encode: by the model's tokenizer.
        images: transformers' image processor.
    """

    def __init__(
        self,
        folder: Path,
        max_pixels: int | None,
        encode: Encode,
        images: type[ImageProcessor] = ImageProcessor,
    ) -> None:
        from transformers import AutoTokenizer
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

        self._process, config = images(folder), load_config(folder)
        kind, file = PROCESSOR_MAPPING[type(config)], folder / "processor_config.json"
        values, known = read_json(file) if file.exists() else {}, signature(kind.__init__).parameters
        own = {name: each for name, each in values.items() if name in known and name != "image_processor"}
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        self._whole = kind(image_processor=self._process.own, tokenizer=tokenizer, **own)
        self._options = dict(getattr(kind, "images_kwargs", {})) | {"return_tensors": None}
        if max_pixels is not None and (most := getattr(self._process.own, "max_patches", None)):
            size = self._process.own.size
            most = min(most, max(max_pixels // (size["height"] * size["width"]), 1))
            self._options |= {"max_patches": most, "min_patches": min(self._process.own.min_patches, most)}
        self._placeholder, self._encode = config.image_token_id, encode
        # What GOT-OCR 2 is told of a page; others take no notice.
        count = values.get("num_image_tokens", getattr(kind, "num_image_tokens", None))
        self._told = {"num_pages_per_batch": [1], "patch_indices": [1], "num_image_tokens": count}

    def __call__(self, rgb: NDArray[np.uint8], *, alone: bool = True) -> Patches:
        """See ``rosebatch.model.vision.vision.Processor``: values are ``[tiles, 3, height, width]``."""
        if (edge := self._process.own.size.shortest_edge) is not None:
            # It is cut to a square later.
            short, long = sorted(rgb.shape[:2])
            require_few_pixels(rgb, edge**2 * long / short)
        found = self._process(rgb, **self._options)
        values = np.stack(found["pixel_values"]).astype(np.uint8)
        text = self._whole.replace_image_token(found, image_idx=0, **self._told)
        token_ids = np.array(self._encode(text), np.uint32)
        count = int((token_ids == self._placeholder).sum())
        return Patches(values, (len(values), count // len(values)), token_ids)


def processed(folder: Path, values: Mapping[str, Any], config: ModelConfig) -> Sight:
    """Arguments as of ``rosebatch.model.vision.registry.VISIONS``."""
    if tuple(map(int, version("transformers").split(".")[:2])) < _OLDEST:
        return f"its images need transformers {'.'.join(map(str, _OLDEST))} or newer"
    own = PROCESSED[values["architectures"][0]]
    # transformers' layers with a window see all of such a prompt.
    longest = min(filter(None, config.kv_windows), default=0) if own.both_ways == "prompt" else 0
    return Vision(
        load_config(folder).image_token_id,
        own.tower.PARTS + own.former,
        partial(TextProcessor, folder, images=own.tower.IMAGES),
        partial(own.tower, folder, former=own.former),
        most_pixels=own.most_pixels,
        activations=own.activations,
        both_ways=own.both_ways,
        longest=longest,
        in_text=own.in_text,
    )
