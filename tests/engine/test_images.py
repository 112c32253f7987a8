"""Which images a step encodes, and which rows get their vectors."""

import weakref
from array import array

import numpy as np
import pytest
import torch

from rosebatch.core.images import PromptImage
from rosebatch.core.sampling_params import GREEDY
from rosebatch.engine.images import ImageEncoder, section_positions
from rosebatch.engine.plan import Chunk, SequenceSpec


class Tower:
    """Vectors are a digest's first byte and the number of the token."""

    def __init__(self):
        self.encoded = []

    def __call__(self, images):
        self.encoded.append([each.digest[0] for each in images])
        counts = [each.grid[0] * each.grid[1] for each in images]
        firsts = torch.cat([torch.full((count,), float(i.digest[0])) for i, count in zip(images, counts, strict=True)])
        numbers = torch.cat([torch.arange(count, dtype=torch.float32) for count in counts])
        return torch.stack((firsts, numbers), 1)[None].split(counts, 1)


def image(number, offset, grid=(2, 2), gets_vector=None):
    gets_vector = np.ones(grid[0] * grid[1], bool) if gets_vector is None else np.array(gets_vector, bool)
    return PromptImage(offset, gets_vector, grid, bytes([number]) * 32, np.zeros((grid[0] * grid[1], 3, 10), np.uint8))


def spec(id, *images):
    return SequenceSpec(id, (0,) * 20, GREEDY, 30, images=images)


def chunk(id, start, end):
    return Chunk(id, start, array("I", [0] * (end - start)), 0)


def encoder(kept_bytes=1 << 20, together=0):
    tower = Tower()
    return tower, ImageEncoder(lambda: tower, (), torch.device("cpu"), together, kept_bytes)


def test_rows_of_chunks_that_cut_images():
    """Rows are of the step, and an image that begins before a chunk gives the rest of its vectors."""
    tower, images = encoder()
    specs = {1: spec(1, image(7, 2), image(8, 6)), 2: spec(2, image(8, 0))}
    found = images.rows_of([chunk(2, 1, 3), chunk(1, 4, 8)], specs)
    assert found.rows.tolist() == [0, 1, 2, 3, 4, 5]
    assert found.vectors[0].tolist() == [[8, 1], [8, 2], [7, 2], [7, 3], [8, 0], [8, 1]]
    assert tower.encoded == [[8], [7]]


def test_tokens_between_an_images_rows_have_no_vectors():
    """A chunk counted them, and took vectors of later tokens. An image was encoded for a chunk of its marks alone."""
    tower, images = encoder()
    specs = {1: spec(1, image(7, 2, gets_vector=[0, 1, 1, 0, 1, 1, 0]))}
    assert images.rows_of([chunk(1, 0, 3)], specs) is None
    assert images.rows_of([chunk(1, 8, 20)], specs) is None
    assert tower.encoded == []
    found = images.rows_of([chunk(1, 4, 8)], specs)
    assert found.rows.tolist() == [0, 2, 3]
    assert found.vectors[0].tolist() == [[7, 1], [7, 2], [7, 3]]


def test_steps_without_images_have_no_rows():
    """A tower was loaded for a prompt whose images are all computed."""
    tower, images = encoder()
    specs = {1: spec(1, image(7, 2)), 2: spec(2)}
    assert images.rows_of([chunk(1, 0, 2), chunk(1, 6, 20), chunk(2, 0, 20)], specs) is None
    assert tower.encoded == []


def test_an_image_is_encoded_once_until_it_is_computed():
    """Where nothing is kept, what the last step read stays: a chunk may have ended inside of it."""
    tower, images = encoder(kept_bytes=0)
    specs = {1: spec(1, image(7, 2), image(8, 6), image(9, 10))}
    for start in range(0, 20, 2):
        images.rows_of([chunk(1, start, start + 2)], specs)
    assert tower.encoded == [[7], [8], [9]]
    images.rows_of([chunk(1, 2, 4)], specs)
    assert tower.encoded == [[7], [8], [9], [7]]


def test_the_least_recently_read_is_dropped():
    """Those that recur stay."""
    tower, images = encoder(kept_bytes=2 * 4 * 2 * 4)
    for number in (1, 2, 1, 3, 1, 2):
        images.rows_of([chunk(1, 0, 4)], {1: spec(1, image(number, 0))})
    assert tower.encoded == [[1], [2], [3], [2]]


@pytest.mark.parametrize("together", [0, 100])
def test_vectors_are_dropped_before_others_are_encoded(together):
    """Those of a step were encoded beside all that were kept before: the plan of memory had no room for both."""
    alive, most = weakref.WeakSet(), []

    class Watched(Tower):
        def __call__(self, images):
            held = sum(each.shape[1] for each in alive)
            most.append(held + sum(each.num_tokens for each in images))
            found = [each.clone() for each in super().__call__(images)]
            alive.update(found)
            return found

    tower = Watched()
    # Of 12 vectors.
    images = ImageEncoder(lambda: tower, (), torch.device("cpu"), together, 12 * 2 * 4)
    specs = {1: spec(1, *(image(number, 4 * number) for number in range(5)))}
    rows = [images.rows_of([chunk(1, start, start + 10)], specs) for start in (0, 10)]
    assert [each.vectors[0, :, 0].tolist() for each in rows] == [
        [0.0] * 4 + [1.0] * 4 + [2.0] * 2,
        [2.0] * 2 + [3.0] * 4 + [4.0] * 4,
    ]
    # The image that both chunks have was encoded once.
    assert sorted(number for group in tower.encoded for number in group) == [0, 1, 2, 3, 4]
    assert max(most) <= 12


def test_images_of_a_step_are_encoded_together():
    """Each took a call of its own: a GPU computed few rows at a time. Memory is planned for so many pixels."""
    alone, by_itself = encoder()
    tower, images = encoder(together=100)
    specs = {1: spec(1, image(7, 0), image(8, 4), image(9, 8), image(7, 12)), 2: spec(2, image(5, 0, (4, 4)))}
    chunks = [chunk(1, 0, 6), chunk(1, 6, 20), chunk(2, 0, 16)]
    found, expected = images.rows_of(chunks, specs), by_itself.rows_of(chunks, specs)
    # 40 pixels each, and 160.
    assert tower.encoded == [[7, 8], [9], [5]]
    assert alone.encoded == [[7], [8], [9], [5]]
    assert found.rows.tolist() == expected.rows.tolist()
    assert found.vectors.tolist() == expected.vectors.tolist()
    # None is kept alive by another one.
    assert all(each.untyped_storage().nbytes() == each.nbytes for each in images._vectors.values())


def test_what_was_encoded_is_told_once():
    """A step counts its own images; vectors that are there cost nothing."""
    _, images = encoder(together=100)
    specs = {1: spec(1, image(7, 0), image(8, 4), image(9, 8))}
    assert images.take_encoded() == (0, ())
    images.rows_of([chunk(1, 0, 20)], specs)
    images.rows_of([chunk(1, 0, 20)], specs)
    found = images.take_encoded()
    assert (found.images, len(found.clocks)) == (3, 2)
    assert found.seconds() > 0
    assert images.take_encoded() == (0, ())


def test_positions_of_parts_are_those_of_the_whole():
    """A chunk that began behind an image counted on from its own start."""
    images = image(7, 2, (3, 2)), image(8, 8, (1, 4))
    whole = section_positions(images, 0, 20)
    assert whole[:3].tolist() == [[0, 0, 0], [1, 1, 1], [2, 2, 2]]
    assert whole[7].tolist() == [2, 4, 3]
    # After the longer side of the image before.
    assert whole[8].tolist() == [5, 5, 5]
    assert whole[11].tolist() == [5, 5, 8]
    assert whole[12].tolist() == [9, 9, 9]
    for start in range(20):
        for end in range(start, 21):
            assert section_positions(images, start, end).tolist() == whole[start:end].tolist()
