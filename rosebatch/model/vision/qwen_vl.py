"""Qwen's models that see: patches merged two by two, three rotary positions; 3 has vectors for its first layers too."""

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.core.images import PromptImage
from rosebatch.model.hf.rope import rope_members
from rosebatch.model.vision.parts import load_config, load_parts
from rosebatch.model.vision.patch_attention import PatchAttention, runs_of
from rosebatch.model.vision.patch_product import PatchProduct
from rosebatch.model.vision.pixels import ImageProcessor, Normalizer, send
from rosebatch.model.vision.vision import Encode, Patches, Vision
from rosebatch.model.weights import WeightSource

# transformers' defaults.
_PLACEHOLDER = 151655
_DEEPSTACK = (8, 16, 24)
_MOST_PIXELS = 28 * 28 * 1280
_PARTS = ("visual",)
# Grids whose numbers are kept: 4 MB each for the largest images.
_GRIDS = 16


class QwenProcessor:
    """transformers' image processor by Pillow, up to patches of whole numbers: the tower rescales and normalises.

    Args:
        folder: of the model.
        placeholder: id of the token.
        max_pixels: of an image that is resized; None for the model's own.
        frames: equal pictures of an image, all of whose pixels count in the model's own limits.
        framed: whether a further vector is behind each row, and one before and one behind all.
    """

    def __init__(
        self, folder: Path, placeholder: int, max_pixels: int | None, frames: int = 1, *, framed: bool = False
    ) -> None:
        self._process, self._placeholder, self._framed = ImageProcessor(folder), placeholder, framed
        self._size, self._frames = dict(self._process.own.size), frames
        if max_pixels is not None:
            most = max_pixels * frames
            self._size = {name: min(self._size[name], most) for name in ("shortest_edge", "longest_edge")}

    def __call__(self, rgb: NDArray[np.uint8], *, alone: bool = True) -> Patches:
        """See ``rosebatch.model.vision.vision.Processor``: values are ``[patches, 3, size, size]``."""
        # An image is a film of equal pictures: one is enough here.
        own, found = self._process.own, self._process(rgb, size=self._size, temporal_patch_size=self._frames)
        patches = found["pixel_values"].reshape(-1, 3, self._frames, own.patch_size, own.patch_size)
        values = patches[:, :, 0].astype(np.uint8)
        _, rows, columns = map(int, found["image_grid_thw"][0])
        rows, columns = rows // own.merge_size, columns // own.merge_size
        count = rows * (columns + 1) + 2 if self._framed else rows * columns
        return Patches(values, (rows, columns), np.full(count, self._placeholder, np.uint32))


class _OfGrid(NamedTuple):
    """What transformers' towers compute of an image's grid alone.

    Attributes:
        of_patches: where each patch is, and which learned positions lie around it, by transformers' names.
        order: of the image's vectors, window after window. Windows of one size follow each other.
        windows: patches of each; none in a tower without windows.
    """

    of_patches: Mapping[str, NDArray[Any]]
    order: NDArray[np.int64]
    windows: Sequence[int]


class QwenTower:
    """transformers' own tower, with other attention, and a product in place of its convolution.

    Args:
        folder: of the model.
        weights: of the model.
    """

    def __init__(self, folder: Path, weights: WeightSource) -> None:
        self._module = load_parts(load_config(folder), weights, _PARTS).visual
        own, self._device = ImageProcessor(folder).own, next(self._module.parameters()).device
        self._module.patch_embed.proj = PatchProduct(self._module.patch_embed.proj)
        for block in self._module.blocks:
            block.attn = PatchAttention(block.attn, self._device)
        self._merge, self._frames = own.merge_size, own.temporal_patch_size
        self._normalize = Normalizer(own, self._device)
        self._of_grid = lru_cache(_GRIDS)(partial(_of_grid, self._module, self._merge))

    def __call__(self, images: Sequence[PromptImage]) -> Sequence[Tensor]:
        """See ``rosebatch.model.vision.vision.Tower``: patches attend to those of their image, products have all."""
        normed = self._normalize([each.patches for each in images]).to(self._module.dtype)
        patches = normed[:, :, None].expand(-1, -1, self._frames, -1, -1).flatten(1)
        grids = [each.grid for each in images]
        found = self._module(patches, return_dict=True, **self._of_grids(grids))
        vectors = torch.stack((found.pooler_output, *(getattr(found, "deepstack_features", None) or ())))
        return torch.split(vectors, [rows * columns for rows, columns in grids], 1)

    def _of_grids(self, grids: Sequence[tuple[int, int]]) -> Mapping[str, Any]:
        """What transformers' towers compute of grids alone, by its names. On the device, they would wait for it.

        Which patches see each other stays on the host, where ``PatchAttention`` reads it.
        """
        each, counts = [self._of_grid(grid) for grid in grids], [rows * columns for rows, columns in grids]
        sent = {name: [one.of_patches[name] for one in each] for name in each[0].of_patches}
        sent["grid_thw"] = [np.array([_shape(grid, self._merge)]) for grid in grids]
        spans = {"cu_seqlens": runs_of([count * self._merge**2 for count in counts])}
        if each[0].windows:
            spans["cu_window_seqlens"] = runs_of([patches for one in each for patches in one.windows])
            firsts = accumulate(counts, initial=0)
            sent["window_index"] = [first + one.order for first, one in zip(firsts, each, strict=False)]
        return spans | {name: send(arrays, self._device) for name, arrays in sent.items()}


def _of_grid(module: Any, merge: int, grid: tuple[int, int]) -> _OfGrid:
    """See ``_OfGrid``.

    Args:
        module: transformers' tower.
        merge: patches of a side that become a vector.
        grid: rows and columns of vectors.
    """
    from transformers import vision_utils

    shape = torch.tensor([_shape(grid, merge)])
    found = {"position_ids": vision_utils.get_vision_position_ids(shape, merge)}
    # Towers of transformers 5.10 find them on the device.
    learned = getattr(vision_utils, "get_vision_interpolation_indices_and_weights", None)
    if learned is not None and (side := getattr(module, "num_grid_per_side", None)) is not None:
        mode, align = module.interpolation_mode, module.interpolation_align_corners
        found["interp_indices"], found["interp_weights"] = learned(shape, side, mode, align, merge)
    order, windows = np.arange(0), list[int]()
    if (size := getattr(module, "window_size", None)) is not None:
        places, ends = vision_utils.get_vision_window_index(shape, merge, size, module.patch_size)
        parts = sorted(np.split(places.numpy(), ends.numpy()[1:-1] // merge**2), key=len)
        order, windows = np.concatenate(parts), [len(part) * merge**2 for part in parts]
    return _OfGrid({name: each.numpy() for name, each in found.items()}, order, windows)


def _shape(grid: tuple[int, int], merge: int) -> list[int]:
    """Frames, rows and columns of an image's patches."""
    return [1, *(each * merge for each in grid)]


def interleaved(sections: Sequence[int], pairs: int) -> tuple[int, ...]:
    """The section of each pair of channels, where height and width take every third pair each, up to their number."""
    _, height, width = sections
    return tuple(1 if i % 3 == 1 and i < 3 * height else 2 if i % 3 == 2 and i < 3 * width else 0 for i in range(pairs))


def in_runs(sections: Sequence[int], pairs: int) -> tuple[int, ...]:
    """The same, where the pairs of a section follow each other."""
    found = tuple(section for section, count in enumerate(sections) for _ in range(count))
    if len(found) != pairs:
        raise ValueError(f"mrope_section is of {len(found)} pairs of channels, a head has {pairs}")
    return found


def qwen3_vl(folder: Path, values: Mapping[str, Any], config: ModelConfig) -> Vision:
    """Qwen3-VL, with and without experts; arguments as of ``rosebatch.model.vision.registry.VISIONS``."""
    added = values["vision_config"].get("deepstack_visual_indexes", _DEEPSTACK)
    if len(added) >= config.num_layers:
        raise ValueError(f"deepstack_visual_indexes has {len(added)} layers for {config.num_layers}")
    return _vision(folder, values, config, interleaved, (24, 20, 20), len(added))


def qwen3_5(folder: Path, values: Mapping[str, Any], config: ModelConfig) -> Vision:
    """Qwen3.5, with and without experts: the tower of Qwen3-VL, without vectors for further layers."""
    return _vision(folder, {"image_token_id": 248056, **values}, config, interleaved, (11, 11, 10))


def qwen2_vl(folder: Path, values: Mapping[str, Any], config: ModelConfig) -> Vision:
    """Qwen2-VL and Qwen2.5-VL: no vectors for further layers."""
    return _vision(folder, values, config, in_runs, (16, 24, 24))


def exaone4_5(folder: Path, values: Mapping[str, Any], config: ModelConfig) -> Vision:
    """EXAONE 4.5: positions of images are those of their tokens; arguments as of ``VISIONS`` of the registry."""
    return _vision(folder, {"image_token_id": 67, **values}, config, lambda *_: (), ())


def most_grid_pixels(
    values: Mapping[str, Any], max_pixels: int | None, max_tokens: int, default: int = _MOST_PIXELS, frames: int = 1
) -> int:
    """See ``MostPixels``; the image processor's own ``default``, and the ``frames`` of ``QwenProcessor``."""
    most = (values.get("max_pixels") or (values.get("size") or {}).get("longest_edge") or default) // frames
    of_token = (values.get("patch_size", 14) * values.get("merge_size", 2)) ** 2
    return int(min(most, max_pixels or most, max_tokens * of_token))


def _vision(
    folder: Path,
    values: Mapping[str, Any],
    config: ModelConfig,
    order: Callable[[Sequence[int], int], tuple[int, ...]],
    default: Sequence[int],
    added: int = 0,
) -> Vision:
    # Older folders have the fields of the text part beside the others.
    text = values.get("text_config") or values
    sections = order(rope_members(text).get("mrope_section") or default, config.rotary_size // 2)
    placeholder = values.get("image_token_id", _PLACEHOLDER)

    def processor(max_pixels: int | None, encode: Encode) -> QwenProcessor:
        return QwenProcessor(folder, placeholder, max_pixels)

    merged = values["vision_config"].get("spatial_merge_size", 2) ** 2
    tower = partial(QwenTower, folder)
    return Vision(placeholder, _PARTS, processor, tower, sections, most_grid_pixels, merged, added)
