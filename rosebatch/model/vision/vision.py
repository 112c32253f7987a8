"""What a model has beside its text part, to see images."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from rosebatch.core.errors import UserError
from rosebatch.core.images import PromptImage
from rosebatch.model.vision.memory import ACTIVATIONS
from rosebatch.model.weights import WeightSource

# The most pixels of an image as the tower has it, with all of its tiles. It takes the image processor's values, the
# most pixels of an image that is resized, None for the model's own, and the most tokens of a prompt.
MostPixels = Callable[[Mapping[str, Any], int | None, int], int]


def of_one_size(values: Mapping[str, Any], max_pixels: int | None, max_tokens: int) -> int:
    """See ``MostPixels``: of a tower to which all images have one size."""
    size = values.get("crop_size") or values["size"]
    if isinstance(size, int):
        # As older folders have it.
        return size**2
    shortest = size.get("shortest_edge", 0)
    found = int(size.get("height", shortest) * size.get("width", shortest))
    if found < 1:
        raise ValueError("its size has no pixels")
    return found


# Token ids of a text alone, where names of special tokens are these.
Encode = Callable[[str], Sequence[int]]
BothWays = Literal["", "windows", "all", "prompt"]


class Patches(NamedTuple):
    """An image that is resized and cut.

    Attributes:
        values: uint8, in the shape and order that the tower wants.
        grid: what the tower needs beside the values. Rows and columns of its vectors; of an image in tiles their
            number, and vectors of each; of a padded one in tiles, its height and width before.
        token_ids: uint32 ``[tokens]``, what takes the place of the placeholder in the prompt: a placeholder for each
            vector, and what the model wants between and around them.
    """

    values: NDArray[np.uint8]
    grid: tuple[int, int]
    token_ids: NDArray[np.uint32]


class Processor(Protocol):
    """Resizes images and cuts them. Any thread may call it; it needs no torch."""

    def __call__(self, rgb: NDArray[np.uint8], *, alone: bool = True) -> Patches:
        """The patches of pixels ``[height, width, 3]``.

        Args:
            rgb: of one image.
            alone: whether it is the only image of its prompt: LLaVA-OneVision sees several less finely.

        Raises:
            ValueError: the model cannot have an image of this shape.
        """
        ...


class Tower(Protocol):
    """Makes vectors of patches."""

    def __call__(self, images: Sequence[PromptImage]) -> Sequence[Tensor]:
        """``[1 + added, vectors, H]`` of each image, see ``rosebatch.model.contract.ImageRows``.

        Where the family allows it, they go through the tower together.
        """
        ...


@dataclass(frozen=True, slots=True)
class Vision:
    """See the module. Neither processor nor tower is loaded before there is an image.

    Attributes:
        placeholder: id of the token that stands for an image's.
        parts: transformers' names of the parts that make vectors; names of their tensors have them between dots.
        processor: loads it; takes the most pixels of an image that is resized, None for the model's own, and the
            model's tokenizer. Raises UserError if the tokenizer lacks tokens.
        tower: loads it.
        sections: for each pair of rotated channels, which of three positions turns it: 0 of time, 1 of height, 2 of
            width; or of four, see ``rosebatch.engine.images.section_positions``. Empty if positions of images are those
            of their tokens.
        most_pixels: for the plan of memory.
        merged: patches that become a vector, for the same plan; fewer where an image never has many vectors.
        activations: see ``tower_bytes``.
        added: vectors of each token that further layers add.
        both_ways: the layers where an image's tokens with vectors see each other: none, those with a window, or all.
            With ``prompt``, all tokens of a prompt with images see each other, in all layers.
        longest: the most tokens of such a prompt; 0 for as many as of others.
        in_text: what chat templates and prompts have for an image, and what takes its place before the text is encoded,
            with a placeholder in it; None if they have the placeholder, and nothing more is wanted.
    """

    placeholder: int
    parts: tuple[str, ...]
    processor: Callable[[int | None, Encode], Processor]
    tower: Callable[[WeightSource], Tower]
    sections: tuple[int, ...] = ()
    most_pixels: MostPixels = of_one_size
    merged: int = 1
    added: int = 0
    activations: int = ACTIVATIONS
    both_ways: BothWays = ""
    longest: int = 0
    in_text: tuple[str, str] | None = None

    @property
    def channel_sections(self) -> tuple[int, ...]:
        """The same for each channel of the rotary tables, which hold every pair twice."""
        return self.sections * 2

    def reads(self, name: str) -> bool:
        """Whether a tensor of this name is of its parts."""
        return not set(self.parts).isdisjoint(name.split("."))


# How a model sees, or why it does not.
Sight = Vision | str
TEXT_ALONE = "it is a model of text"


def no_images(why: str) -> str:
    """What to tell of a model that does not see."""
    return f"the model takes no images: {why}"


def token_id(encode: Encode, name: str) -> int:
    """The id of a special token.

    Raises:
        UserError: the tokenizer has none of this name.
    """
    found = encode(name)
    if len(found) != 1:
        raise UserError(f"the tokenizer has no token {name}, which the model's images need")
    return found[0]
