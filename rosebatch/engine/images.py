"""Images in the steps of a runner: their vectors, and the positions of their tokens."""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rosebatch.config.run import RunConfig
from rosebatch.core.images import PromptImage
from rosebatch.engine.device_clock import DeviceClock
from rosebatch.engine.plan import Chunk, SequenceSpec
from rosebatch.engine.staging import Staging
from rosebatch.model.contract import ImageRows
from rosebatch.model.source import ModelSource
from rosebatch.model.vision.vision import BothWays, Tower

# Of vectors that are kept for a next chunk with the image, or a next prompt: 16 images of 1,024 tokens in Qwen3-VL-2B.
# The largest image may have more.
_KEPT_BYTES = 1 << 28
# Pixels of images that are encoded together, if no image has more: 4,096 patches in Qwen3-VL.
_TOGETHER = 1 << 20
# The last of three rotary positions: time, height and width.
_AXES = 2


def image_bytes(source: ModelSource, limits: RunConfig, tokens: int) -> int:
    """Bytes that images may take of each device, from the first one on; 0 if there are none.

    Args:
        source: of the model.
        limits: of the run.
        tokens: of a step, at most.
    """
    pixels = together(source, limits)
    if not pixels:
        return 0
    # Beside those that are kept, a step has a copy of what it reads.
    return source.tower_bytes(pixels) + kept_bytes(source, limits) + tokens * _bytes_of_vector(source)


def kept_bytes(source: ModelSource, limits: RunConfig) -> int:
    """Bytes of vectors that are kept. The largest image is among them: its chunks may be those of many steps."""
    return max(_KEPT_BYTES, source.most_vectors(limits) * _bytes_of_vector(source))


def _bytes_of_vector(source: ModelSource) -> int:
    """With those that further layers add."""
    added = source.vision.added if source.vision else 0
    return (1 + added) * source.config.hidden_size * source.dtype.itemsize


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
    beside, each is encoded alone. The least recently read vectors are dropped before others are encoded. What a step
    reads last stays, because a chunk may end inside of an image.

    Args:
        load_tower: called at the first image.
        sections: of the model's rotary channels, see ``Vision.channel_sections``.
        device: of the run.
        together: pixels of images that are encoded together; an image may have more. 0: each alone.
        kept_bytes: of vectors.
        both_ways: see ``Vision``.

    Attributes:
        axes: rotary positions of a token of images, see ``section_positions``; 0 if it has one as others.
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
        self.axes = max(_AXES, *sections, -1) + 1 if sections else 0
        self._load_tower = load_tower
        self._tower: Tower | None = None
        self._device = device
        self._together = together
        self._up = Staging(device)
        self._kept_bytes = kept_bytes
        # Of those that are kept.
        self._bytes = 0
        # By digest; the last one was read last.
        self._vectors: OrderedDict[bytes, Tensor] = OrderedDict()
        self._encoded = NOTHING_ENCODED

    def rows_of(self, chunks: Sequence[Chunk], specs: Mapping[int, SequenceSpec]) -> ImageRows | None:
        """The rows of a step that are of images, with their vectors; None if there are none."""
        rows: list[np.ndarray] = []
        # By digest: each image once, and which of its vectors are which rows'.
        images: dict[bytes, PromptImage] = {}
        parts = defaultdict[bytes, list[tuple[slice, slice]]](list)
        first = total = 0
        for chunk in chunks:
            for image in specs[chunk.id].images:
                begin = max(chunk.start - image.offset, 0)
                own = image.gets_vector[begin : max(chunk.end - image.offset, 0)]
                if count := int(own.sum()):
                    before = int(image.gets_vector[:begin].sum())
                    images.setdefault(image.digest, image)
                    parts[image.digest].append((slice(before, before + count), slice(total, total + count)))
                    rows.append(first + image.offset + begin - chunk.start + np.flatnonzero(own))
                    total += count
            first += len(chunk.token_ids)
        if not rows:
            return None
        (places,) = self._up.send(np.concatenate(rows))
        found: list[Tensor] = []

        def read(image: PromptImage, vectors: Tensor) -> None:
            if not found:
                found.append(vectors.new_empty(len(vectors), total, vectors.shape[2]))
            for own, place in parts[image.digest]:
                found[0][:, place] = vectors[:, own]

        # Before others are encoded, which may take their room.
        for image in images.values():
            if image.digest in self._vectors:
                self._vectors.move_to_end(image.digest)
                read(image, self._vectors[image.digest])
                del parts[image.digest]
        for group in self._groups(images[digest] for digest in parts):
            self._encode(group, read)
        return ImageRows(places, found[0])

    def take_encoded(self) -> Encoded:
        """What was encoded since the last call."""
        found, self._encoded = self._encoded, NOTHING_ENCODED
        return found

    def _encode(self, group: Sequence[PromptImage], read: Callable[[PromptImage, Tensor], None]) -> None:
        """Have the vectors of a group be read. They are kept, and are the last read ones then."""
        self._make_room(sum(int(image.gets_vector.sum()) for image in group))
        self._tower = self._tower or self._load_tower()
        clock = DeviceClock(self._device)
        found = self._tower(group)
        clock.stop()
        self._encoded = Encoded(self._encoded.images + len(group), (*self._encoded.clocks, clock))
        for image, vectors in zip(group, found, strict=True):
            assert vectors.shape[1] == image.gets_vector.sum(), "a vector for each placeholder"
            read(image, vectors)
            # A part of a tensor would keep the vectors of the whole group.
            self._vectors[image.digest] = vectors.clone() if len(group) > 1 else vectors
            self._bytes += vectors.nbytes

    def _make_room(self, count: int) -> None:
        """Drop the least recently read vectors, until so many more may be kept."""
        while self._vectors:
            oldest = next(iter(self._vectors.values()))
            if self._bytes + count * oldest.nbytes // oldest.shape[1] <= self._kept_bytes:
                return
            self._bytes -= oldest.nbytes
            self._vectors.popitem(last=False)

    def _groups(self, images: Iterable[PromptImage]) -> Iterator[list[PromptImage]]:
        group: list[PromptImage] = []
        for image in images:
            if group and sum(each.num_pixels for each in (*group, image)) > self._together:
                yield group
                group = []
            group.append(image)
        if group:
            yield group


def rotary_shift(images: Sequence[PromptImage], axes: int = 3) -> int:
    """What all positions of a generated token are beyond its place: 0 or less."""
    return sum(max(image.grid) - image.num_tokens for image in images) if axes == 3 else 0


def section_positions(images: Sequence[PromptImage], start: int, end: int, axes: int = 3) -> np.ndarray:
    """``[tokens, axes]`` int32, the rotary positions of a sequence's tokens. All tokens of such an image get vectors.

    With three axes, of time, height and width, the tokens of an image have one time, and their row and column of its
    grid. What follows an image goes on after the longer side of the grid (source: Qwen2-VL, arXiv 2409.12191).

    With four, of place, width, height and image, a vector is before the rows of an image's grid, one behind each of
    them, and one behind all. Those of rows have their column, their row, and the number of the image (source:
    transformers' HunYuan-VL). Nothing moves what follows.

    Args:
        images: of the sequence.
        start, end: places of the first token, and after the last.
        axes: see above.
    """
    places = np.arange(start, end, dtype=np.int32)
    positions, shift = np.repeat(places[:, None], axes, 1), 0
    for index, image in enumerate(images):
        # Of its grid, with the vectors behind rows.
        framed = axes == 4
        first, last, columns = image.offset + framed, image.end - framed, image.grid[1] + framed
        own = slice(max(first - start, 0), max(last - start, 0))
        rows, within = np.divmod(places[own] - first, columns)
        if framed:
            positions[own, 1:] = np.stack((within, rows, np.full_like(rows, index)), 1)
            continue
        positions[own] = first + shift
        positions[own, 1] += rows
        positions[own, 2] += within
        shift += max(image.grid) - image.num_tokens
        positions[own.stop :] = places[own.stop :, None] + shift
    return positions


def key_ends(images: Sequence[PromptImage], start: int, end: int) -> np.ndarray:
    """``[tokens]`` int32, for each token of a sequence the place after the last key that it sees.

    An image's tokens with vectors see each other, which follow each other; or all tokens of its prompt do.

    Args:
        images: of the sequence.
        start, end: places of the first token, and after the last.
    """
    ends = np.arange(start + 1, end + 1, dtype=np.int32)
    for image in images:
        ends[max(image.seen_begin - start, 0) : max(image.seen_end - start, 0)] = image.seen_end
    return ends
