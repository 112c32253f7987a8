"""What a model has beside its text part, to see images."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rosebatch.model.weights import WeightSource


class Patches(NamedTuple):
    """An image that is resized and cut.

    Attributes:
        values: uint8 ``[patches, …]``, in the order that the tower wants.
        grid: rows and columns of its tokens.
    """

    values: NDArray[np.uint8]
    grid: tuple[int, int]


class Processor(Protocol):
    """Resizes images and cuts them. Any thread may call it; it needs no torch."""

    def __call__(self, rgb: NDArray[np.uint8]) -> Patches:
        """The patches of pixels ``[height, width, 3]``.

        Raises:
            ValueError: the model cannot have an image of this shape.
        """
        ...


class Tower(Protocol):
    """Makes vectors of patches."""

    def __call__(self, values: NDArray[np.uint8], grid: tuple[int, int]) -> Tensor:
        """``[1 + added, tokens, H]`` of one image, see ``rosebatch.model.contract.ImageRows``."""
        ...


@dataclass(frozen=True, slots=True)
class Vision:
    """See the module. Neither processor nor tower is loaded before there is an image.

    Attributes:
        placeholder: id of the token that stands for an image's.
        module: a part of the names of the tower's tensors, between dots.
        processor: loads it; takes the most pixels of an image that is resized, None for the model's own.
        tower: loads it.
        sections: for each pair of rotated channels, which of three positions turns it: 0 of time, 1 of height, 2 of
            width. Empty if positions of images are those of their tokens.
    """

    placeholder: int
    module: str
    processor: Callable[[int | None], Processor]
    tower: Callable[[WeightSource], Tower]
    sections: tuple[int, ...] = ()

    @property
    def channel_sections(self) -> tuple[int, ...]:
        """The same for each channel of the rotary tables, which hold every pair twice."""
        return self.sections * 2


def load_config(folder: Any) -> Any:
    """transformers' config of a whole model."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
