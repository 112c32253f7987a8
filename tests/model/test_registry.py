"""What the registry says of each family: its name and what its layers weigh."""

from typing import get_type_hints

import pytest
import torch

from rosebatch.config import ModelConfig
from rosebatch.engine.roofline import weight_bytes
from rosebatch.model.registry import FAMILIES, build_model
from rosebatch.model.weights import RandomWeights
from rosebatch.ops import select
from rosebatch.toggles import Toggles
from tests.engine.family_models import FAMILIES as FAMILY_MODELS
from tests.engine.small_models import CPU, MODELS


class CountedWeights(RandomWeights):
    """Counts the elements of all matrices but norms, and tables of positions: a step reads one row of these."""

    def __init__(self):
        super().__init__(torch.float32, CPU)
        self.elements = 0

    def get(self, name, shape, **options):
        self.elements += shape[0] * shape[1] if len(shape) == 2 and "wpe" not in name and "norm" not in name else 0
        return super().get(name, shape, **options)


def test_config_and_registry_name_the_same_families():
    """A family in one of them only is a KeyError in the middle of a run."""
    assert set(get_type_hints(ModelConfig)["family"].__args__) == set(FAMILIES)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_floor_counts_the_matrices_that_are_loaded(family):
    """A gate too many in the count would lower the floor that a report divides by."""
    weights = CountedWeights()
    config = {**MODELS, **FAMILY_MODELS}[family]
    build_model(config, select(Toggles.resolve({}, "cpu")), weights)
    assert weight_bytes(config, itemsize=1) == weights.elements
