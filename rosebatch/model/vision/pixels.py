"""Pixels on their way to a tower: whole numbers while they are resized and wait, normalised on the device."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rosebatch.core.errors import UserError
from rosebatch.host.model_files import read_json

# Of a whole processor in newer folders, and of an image processor alone.
PROCESSORS = _WHOLE, _OWN = "processor_config.json", "preprocessor_config.json"
# Of what an image becomes on its way, and is cut to a size then: 400 MB.
_MAX_PIXELS = 1 << 27


def read_processor(folder: Path) -> Mapping[str, Any]:
    """The values of a model's image processor, from the file that transformers takes; empty if there is none."""
    found = _values(folder / _WHOLE).get("image_processor")
    found = _values(folder / _OWN) if found is None else found
    return found if isinstance(found, dict) else {}


def _values(file: Path) -> Mapping[str, Any]:
    try:
        return read_json(file)
    except UserError:
        # There is none, or it is broken: the text part is served all the same.
        return {}


class ImageProcessor:
    """transformers' image processor of a model, the one that needs Pillow alone, up to whole numbers.

    Attributes:
        own: transformers'.

    Args:
        folder: of the model.
    """

    def __init__(self, folder: Path) -> None:
        # transformers 5.10 hands it out by this name alone where torchvision is missing.
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        self.own = AutoImageProcessor.from_pretrained(
            str(folder), backend="pil", local_files_only=True, trust_remote_code=False
        )

    def __call__(self, rgb: NDArray[np.uint8], *, alone: bool = True, **options: Any) -> Any:
        """What it makes of pixels ``[height, width, 3]``, neither rescaled nor normalised.

        Args:
            rgb: of one image.
            alone: whether it is the only image of its prompt; else a second one of a pixel is put beside it.
            options: of the image processor.
        """
        return self.own.preprocess(
            [rgb] if alone else [[rgb, rgb[:1, :1]]],
            # Three rows of pixels are no three channels.
            input_data_format="channels_last",
            do_convert_rgb=False,
            do_rescale=False,
            do_normalize=False,
            **options,
        )


def require_few_pixels(rgb: NDArray[np.uint8], pixels: float) -> None:
    """Check how many an image would become on its way.

    Raises:
        ValueError: too many.
    """
    if pixels > _MAX_PIXELS:
        height, width, _ = rgb.shape
        raise ValueError(f"of {width} by {height} pixels, {pixels:.0f} would be made: shorten its longer side")


class Normalizer:
    """The image processor's last steps.

    Args:
        own: transformers' image processor.
        device: of the result.
    """

    def __init__(self, own: Any, device: torch.device) -> None:
        self._scale = own.rescale_factor if own.do_rescale else 1.0
        mean, std = (own.image_mean, own.image_std) if own.do_normalize else ([0.0] * 3, [1.0] * 3)
        self._mean, self._std = (torch.tensor(each, device=device)[:, None, None] for each in (mean, std))

    def __call__(self, values: Sequence[NDArray[np.uint8]]) -> Tensor:
        """``[N, 3, height, width]`` fp32, of arrays of this shape one after the other."""
        return (send(values, self._mean.device).float() * self._scale - self._mean) / self._std


def send(values: Sequence[NDArray[Any]], device: torch.device) -> Tensor:
    """``[N, ...]`` on the device, of arrays of this shape one after the other. The host does not wait for it."""
    shape, dtype = (sum(map(len, values)), *values[0].shape[1:]), getattr(torch, values[0].dtype.name)
    # PyTorch gives such memory out again once what was copied from it is there.
    host = torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
    np.concatenate(values, out=host.numpy())
    return host.to(device, non_blocking=True)
