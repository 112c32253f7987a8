"""Qwen's models that see: patches merged two by two, three rotary positions; 3 has vectors for its first layers too."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rosebatch.config.model import ModelConfig
from rosebatch.model.hf.rope import rope_members
from rosebatch.model.vision.vision import Patches, Vision, load_config
from rosebatch.model.weights import WeightSource

# transformers' defaults.
_PLACEHOLDER = 151655
_DEEPSTACK = (8, 16, 24)
_MODULE = "visual"


class QwenProcessor:
    """transformers' image processor by Pillow, up to patches of whole numbers: the tower rescales and normalises.

    Args:
        folder: of the model.
        max_pixels: of an image that is resized; None for the model's own.
    """

    def __init__(self, folder: Path, max_pixels: int | None) -> None:
        self._own = load_image_processor(folder)
        self._size = dict(self._own.size)
        if max_pixels is not None:
            self._size = {name: min(self._size[name], max_pixels) for name in ("shortest_edge", "longest_edge")}

    def __call__(self, rgb: NDArray[np.uint8]) -> Patches:
        """See ``rosebatch.model.vision.vision.Processor``: values are ``[patches, 3, size, size]``."""
        own = self._own
        found = own.preprocess(
            [rgb],
            size=self._size,
            # Three rows of pixels are no three channels.
            input_data_format="channels_last",
            do_convert_rgb=False,
            do_rescale=False,
            do_normalize=False,
        )
        patches = found["pixel_values"].reshape(-1, 3, own.temporal_patch_size, own.patch_size, own.patch_size)
        _, rows, columns = map(int, found["image_grid_thw"][0])
        # An image is a film of equal pictures.
        return Patches(patches[:, :, 0].astype(np.uint8), (rows // own.merge_size, columns // own.merge_size))


class QwenTower:
    """transformers' own tower.

    Args:
        folder: of the model.
        weights: of the model.
    """

    def __init__(self, folder: Path, weights: WeightSource) -> None:
        own, config = load_image_processor(folder), load_config(folder)
        self._module = load_tower(config, weights)
        self._merge, self._frames = own.merge_size, own.temporal_patch_size
        device = next(self._module.parameters()).device
        self._scale = own.rescale_factor if own.do_rescale else 1.0
        mean, std = (own.image_mean, own.image_std) if own.do_normalize else ([0.0] * 3, [1.0] * 3)
        self._mean, self._std = (torch.tensor(each, device=device)[:, None, None] for each in (mean, std))

    def __call__(self, values: NDArray[np.uint8], grid: tuple[int, int]) -> Tensor:
        """See ``rosebatch.model.vision.vision.Tower``."""
        pixels = torch.from_numpy(values).to(self._mean.device)
        normed = (pixels.float() * self._scale - self._mean) / self._std
        patches = normed[:, :, None].expand(-1, -1, self._frames, -1, -1).flatten(1)
        shape = torch.tensor([[1, grid[0] * self._merge, grid[1] * self._merge]], device=pixels.device)
        found = self._module(patches.to(self._module.dtype), grid_thw=shape, return_dict=True)
        return torch.stack((found.pooler_output, *(getattr(found, "deepstack_features", None) or ())))


def load_image_processor(folder: Path) -> Any:
    """transformers' image processor of a model, the one that needs Pillow alone."""
    from transformers import AutoImageProcessor

    return AutoImageProcessor.from_pretrained(
        str(folder), backend="pil", local_files_only=True, trust_remote_code=False
    )


def load_tower(config: Any, weights: WeightSource) -> Any:
    """transformers' module for the images of a model, with the model's weights.

    Args:
        config: of the whole model.
        weights: of the model.

    Raises:
        UserError: a tensor is missing, or has another shape.
    """
    from transformers import AutoModelForImageTextToText

    # Not all towers have a name of their own among transformers' models.
    with torch.device("meta"):
        kind = type(getattr(AutoModelForImageTextToText.from_config(config).model, _MODULE))
    # Its buffers are computed here.
    module = kind._from_config(config.vision_config, dtype=weights.dtype)
    state = {
        name: weights.get(f"model.{_MODULE}.{name}", tuple(each.shape)) for name, each in module.state_dict().items()
    }
    device = next(iter(state.values())).device
    module.load_state_dict(state, assign=True)
    return module.to(device).eval().requires_grad_(False)


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
    return _vision(folder, values, config, interleaved, (24, 20, 20))


def qwen3_5(folder: Path, values: Mapping[str, Any], config: ModelConfig) -> Vision:
    """Qwen3.5, with and without experts: the tower of Qwen3-VL, without vectors for further layers."""
    return _vision(folder, {"image_token_id": 248056, **values}, config, interleaved, (11, 11, 10))


def qwen2_5_vl(folder: Path, values: Mapping[str, Any], config: ModelConfig) -> Vision:
    """Qwen2.5-VL: no vectors for further layers."""
    return _vision(folder, values, config, in_runs, (16, 24, 24))


def _vision(
    folder: Path,
    values: Mapping[str, Any],
    config: ModelConfig,
    order: Callable[[Sequence[int], int], tuple[int, ...]],
    default: Sequence[int],
) -> Vision:
    # Older folders have the fields of the text part beside the others.
    text = values.get("text_config") or values
    sections = order(rope_members(text).get("mrope_section") or default, config.rotary_size // 2)
    placeholder = values.get("image_token_id", _PLACEHOLDER)
    return Vision(placeholder, _MODULE, partial(QwenProcessor, folder), partial(QwenTower, folder), sections)
