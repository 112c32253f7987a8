"""What a caller hands over decoded has the pixels that its file would have."""

import pickle
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from rosebatch.core.errors import RowError
from rosebatch.io.images.decode import decode
from rosebatch.io.images.load import load_image
from rosebatch.io.images.picture import Picture
from rosebatch.io.images.policy import MediaPolicy
from rosebatch.io.images.references import ImageReference, source_of
from tests.io.images.picture_files import good_files, picture, saved


def loaded(given):
    return load_image(ImageReference("here", source_of(given, "here")), MediaPolicy())


@pytest.mark.parametrize("name", sorted(good_files()))
def test_an_opened_picture_is_as_its_file(name):
    """Pictures that lie on their side, or shine through, were seen otherwise than from their file; pickled, too."""
    content = good_files()[name]
    expected = decode(content)
    opened = Image.open(BytesIO(content))
    assert loaded(opened).digest == expected.digest
    assert pickle.loads(pickle.dumps(Picture(Image.open(BytesIO(content))))).rgb().tolist() == expected.rgb.tolist()


def test_arrays_and_files():
    """Pixels of one shape and value have one digest, whatever they came in."""
    pixels = np.array(picture())
    content = saved("PNG")
    read_only = np.asarray(picture())
    mirrored = np.asfortranarray(pixels)
    found = [loaded(each) for each in (pixels, read_only, mirrored, content, picture())]
    assert len({each.digest for each in found}) == 1
    # PyTorch warns of others.
    assert all(each.rgb.flags.writeable and each.rgb.flags.c_contiguous for each in found)


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((3, 4, 4), np.uint8),
        np.zeros((4, 4), np.uint8),
        np.zeros((4, 4, 3), np.float32),
        np.zeros((1, 4, 4, 3), np.uint8),
    ],
)
def test_arrays_that_are_no_pictures(array):
    """Channels in front were taken for three rows of pixels, and fractions for black."""
    with pytest.raises(RowError, match=r"^here: an array must be uint8") as caught:
        source_of(array, "here")
    assert caught.value.code == "invalid_image"


@pytest.mark.parametrize("given", [np.zeros((0, 4, 3), np.uint8), Image.new("RGB", (0, 0)), Image.new("L", (0, 5))])
def test_pictures_without_pixels(given):
    """The row's error was that of a division by zero."""
    with pytest.raises(RowError, match=r"^here: the picture has no pixels$") as caught:
        source_of(given, "here")
    assert caught.value.code == "invalid_image"


def test_a_path_of_the_caller_is_under_the_policy(tmp_path):
    """A path is a text in another form: a script passes on those of its rows."""
    (tmp_path / "a.png").write_bytes(saved("PNG"))
    reference = ImageReference("here", source_of(Path("a.png"), "here"))
    with pytest.raises(RowError, match="below --media-root alone"):
        load_image(reference, MediaPolicy())
    assert load_image(reference, MediaPolicy(root=tmp_path)).rgb.shape == (7, 9, 3)


def test_bytes_are_decoded_within_limits():
    """They may be a file of anybody's."""
    with pytest.raises(RowError, match="more than 5 bytes"):
        load_image(ImageReference("here", b"123456"), MediaPolicy(max_bytes=5))
    with pytest.raises(RowError, match="it is no JPEG") as caught:
        loaded(b"123456")
    assert caught.value.code == "invalid_image"
