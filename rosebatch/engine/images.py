"""Images in the steps of a runner: their vectors, and the positions of their tokens."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rosebatch.config.run import RunConfig
from rosebatch.core.images import PromptImage
from rosebatch.engine.device_clock import DeviceClock
from rosebatch.engine.plan import Chunk, SequenceSpec
from rosebatch.model.contract import ImageRows
from rosebatch.model.source import ModelSource
from rosebatch.model.vision.vision import BothWays, Tower

# Of vectors that are kept for a next chunk with the image, or a next prompt: 16 images of 1,024 tokens in Qwen3-VL-2B.
_KEPT_BYTES = 1 << 28
# Pixels of images that are encoded together, if no image has more: 4,096 patches in Qwen3-VL.
_TOGETHER = 1 << 20


def image_bytes(source: ModelSource, limits: RunConfig, tokens: int) -> int:
    """Bytes that images may take of each device, from the first one on; 0 if there are none.

    Args:
        source: of the model.
        limits: of the run.
        tokens: of a step, at most.
    """
    pixels = together(source, limits)
    if not pixels or source.vision is None:
        return 0
    vectors = tokens * (1 + source.vision.added) * source.config.hidden_size * source.dtype.itemsize
    # Those that are kept, and the copy that a step reads.
    return source.tower_bytes(pixels) + max(_KEPT_BYTES, vectors) + vectors


def together(source: ModelSource, limits: RunConfig) -> int:
    """Pixels of images that are encoded together: the largest image's, or more if it is small; 0 if there are none."""
    most = source.most_pixels(limits)
    return max(most, _TOGETHER) if most else 0


class Encoded(NamedTuple):
    """How many images were encoded, and how long that took.

    Attributes:
        clocks: of the groups that were encoded together.
    """

    images: int = 0
    clocks: Sequence[DeviceClock] = ()

    def seconds(self) -> float:
        """Of the device; waits for it."""
        return sum(clock.seconds() for clock in self.clocks)


NOTHING_ENCODED = Encoded()


class ImageEncoder:
    """The vectors of the images that steps read.

    Images of a step are encoded together, as far as memory is planned for. Where bits may not depend on the images
    beside, each is encoded alone. The least recently read vectors are dropped; those of the last step stay, because a
    chunk may end inside of an image.

    Args:
        load_tower: called at the first image.
        sections: of the model's rotary channels, see ``Vision.channel_sections``.
        device: of the run.
        together: pixels of images that are encoded together; an image may have more. 0: each alone.
        kept_bytes: of vectors.
        both_ways: see ``Vision``.
    """

    def __init__(
        self,
        load_tower: Callable[[], Tower],
        sections: Sequence[int],
        device: torch.device,
        together: int = 0,
        kept_bytes: int = _KEPT_BYTES,
        *,
        both_ways: BothWays = "",
    ) -> None:
        self.both_ways = both_ways
        self.sections = torch.tensor(sections, device=device) if sections else None
        self._load_tower = load_tower
        self._tower: Tower | None = None
        self._device = device
        self._together = together
        self._kept_bytes = kept_bytes
        # By digest; the last one was read last.
        self._vectors: OrderedDict[bytes, Tensor] = OrderedDict()
        self._encoded = NOTHING_ENCODED

    def rows_of(self, chunks: Sequence[Chunk], specs: Mapping[int, SequenceSpec]) -> ImageRows | None:
        """The rows of a step that are of images, with their vectors; None if there are none."""
        rows: list[int] = []
        read: list[tuple[PromptImage, slice]] = []
        first = 0
        for chunk in chunks:
            for image in specs[chunk.id].images:
                begin = max(chunk.start - image.offset, 0)
                own = image.gets_vector[begin : max(chunk.end - image.offset, 0)]
                if own.any():
                    before = int(image.gets_vector[:begin].sum())
                    rows += (first + image.offset + begin - chunk.start + np.flatnonzero(own)).tolist()
                    read.append((image, slice(before, before + int(own.sum()))))
            first += len(chunk.token_ids)
        if not rows:
            return None
        self._encode([image for image, _ in read])
        vectors = [self._vectors[image.digest][:, own] for image, own in read]
        self._drop({image.digest for image, _ in read})
        return ImageRows(torch.tensor(rows, device=self._device), torch.cat(vectors, 1))

    def take_encoded(self) -> Encoded:
        """What was encoded since the last call."""
        found, self._encoded = self._encoded, NOTHING_ENCODED
        return found

    def _encode(self, images: Sequence[PromptImage]) -> None:
        """Have the vectors of all of them, which are the last read ones then."""
        lacking = {image.digest: image for image in images if image.digest not in self._vectors}
        for group in self._groups(lacking.values()):
            self._tower = self._tower or self._load_tower()
            clock = DeviceClock(self._device)
            vectors = self._tower(group)
            clock.stop()
            self._encoded = Encoded(self._encoded.images + len(group), (*self._encoded.clocks, clock))
            for image, found in zip(group, vectors, strict=True):
                assert found.shape[1] == image.gets_vector.sum(), "a vector for each placeholder"
                # A part of a tensor would keep the vectors of the whole group.
                self._vectors[image.digest] = found.clone() if len(group) > 1 else found
        for image in images:
            self._vectors.move_to_end(image.digest)

    def _groups(self, images: Iterable[PromptImage]) -> Iterator[list[PromptImage]]:
        group: list[PromptImage] = []
        for image in images:
            if group and sum(each.num_pixels for each in (*group, image)) > self._together:
                yield group
                group = []
            group.append(image)
        if group:
            yield group

    def _drop(self, read: set[bytes]) -> None:
        size = sum(each.nbytes for each in self._vectors.values())
        for digest in list(self._vectors):
            if size <= self._kept_bytes or digest in read:
                return
            size -= self._vectors.pop(digest).nbytes


def rotary_shift(images: Sequence[PromptImage]) -> int:
    """What all three positions of a generated token are beyond its place: 0 or less."""
    return sum(max(image.grid) - image.num_tokens for image in images)


def section_positions(images: Sequence[PromptImage], start: int, end: int) -> np.ndarray:
    """``[tokens, 3]`` int32, the rotary positions of a sequence's tokens: of time, height and width.

    The tokens of an image have one time, and their row and column of its grid. What follows an image goes on after the
    longer side of the grid (source: Qwen2-VL, arXiv 2409.12191). All tokens of such an image get vectors.

    Args:
        images: of the sequence.
        start, end: places of the first token, and after the last.
    """
    places = np.arange(start, end, dtype=np.int32)
    positions, shift = np.repeat(places[:, None], 3, 1), 0
    for image in images:
        own = slice(max(image.offset - start, 0), max(image.end - start, 0))
        number, columns = places[own] - image.offset, image.grid[1]
        positions[own] = image.offset + shift
        positions[own, 1] += number // columns
        positions[own, 2] += number % columns
        shift += max(image.grid) - image.num_tokens
        positions[own.stop :] = places[own.stop :, None] + shift
    return positions


def key_ends(images: Sequence[PromptImage], start: int, end: int) -> np.ndarray:
    """``[tokens]`` int32, for each token of a sequence the place after the last key that it sees.

    An image's tokens with vectors see each other. They follow each other.

    Args:
        images: of the sequence.
        start, end: places of the first token, and after the last.
    """
    ends = np.arange(start + 1, end + 1, dtype=np.int32)
    for image in images:
        ends[max(image.vectors_begin - start, 0) : max(image.vectors_end - start, 0)] = image.vectors_end
    return ends
