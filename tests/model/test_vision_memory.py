"""What towers take, as far as no family is needed to know it; ``tests/golden/test_images.py`` has the families."""

import pytest

from rosebatch.model.vision.memory import tower_bytes
from rosebatch.model.vision.vision import of_one_size


@pytest.mark.parametrize(
    "values",
    [
        {"size": {"height": 20, "width": 30}},
        {"crop_size": {"height": 20, "width": 30}, "size": {"shortest_edge": 25}},
        {"crop_size": None, "size": {"height": 20, "width": 30}},
    ],
)
def test_size_of_all_images(values):
    """Images are cut after they are resized: the size before says nothing."""
    assert of_one_size(values, 7, 9) == 600


@pytest.mark.parametrize("size", [20, {"shortest_edge": 20}])
def test_size_of_squares(size):
    """Older folders have a number in place of a dictionary, which ended runs of texts."""
    assert of_one_size({"size": size}, None, 9) == 400


def test_bytes_of_a_tower():
    """Weights in the run's dtype, and 40 values of each channel of a patch: here of 3 patches of 4 x 4 pixels."""
    shapes = {"cut.weight": (8, 3, 2, 4, 4), "cut.bias": (8,), "product.weight": (8, 8)}
    assert tower_bytes(shapes, 2, 48) == 2 * (768 + 8 + 64) + 2 * 40 * 8 * 3
    assert tower_bytes({"product.weight": (8, 3)}, 2, 48) == 48
