"""Where chunks of prompts may end. No torch."""

from collections.abc import Sequence
from dataclasses import dataclass

from rosebatch.core.errors import RowError
from rosebatch.core.images import PromptImage
from rosebatch.core.words import counted


@dataclass(frozen=True, slots=True)
class ChunkEnds:
    """See the module. A sequence's end is always one.

    Attributes:
        unit: others are multiples of so many tokens. Kernels add up the keys of a chunk's last tile in an order that
            goes by its end, and take a state from tile to tile.
        whole_images: no other is between tokens of images or prompts that see each other.
    """

    unit: int = 1
    whole_images: bool = False

    def longest(self, images: Sequence[PromptImage], start: int, length: int) -> int:
        """How many of so many tokens from ``start`` on are a chunk that ends before its sequence; 0 for none."""
        end = start + length
        while end > start:
            if past := end % self.unit:
                end -= past
            elif image := self._image_around(images, end):
                end = image.seen_begin
            else:
                return end - start
        return 0

    def longest_whole(self, images: Sequence[PromptImage], start: int, length: int) -> int:
        """The same where a step has less room than a unit: units do not count."""
        return ChunkEnds(1, self.whole_images).longest(images, start, length)

    def require_room(self, images: Sequence[PromptImage], num_tokens: int, most: int) -> None:
        """Check that a prompt with images can be cut into chunks.

        Args:
            images: of the prompt.
            num_tokens: of the prompt.
            most: tokens of a chunk.

        Raises:
            RowError: it cannot.
        """
        if not (self.whole_images and images):
            return
        ends, start = self if most >= self.unit else ChunkEnds(1, self.whole_images), 0
        while num_tokens - start > most:
            length = ends.longest(images, start, most)
            if not length:
                image = next(image for image in images if image.seen_end > start)
                count = image.seen_end - image.seen_begin
                what = "a prompt with images" if image.whole_prompt else "an image"
                told = f"{what} has {counted(count, 'token')}, and is computed in one step"
                if count <= most:
                    told = f"between images, no chunk ends at a multiple of {self.unit} tokens"
                raise RowError("image_too_large", f"{told}; --max-num-batched-tokens leaves {most}")
            start += length

    def _image_around(self, images: Sequence[PromptImage], end: int) -> PromptImage | None:
        """The image that a chunk with this end would cut."""
        if not self.whole_images:
            return None
        return next((image for image in images if image.seen_begin < end < image.seen_end), None)
