"""A rehearsal goes through one layer of each kind."""

from types import SimpleNamespace

import msgspec
import pytest

from rosebatch.model.layers import few_layers
from tests.engine.small_models import MODELS


def test_a_rehearsal_leaves_a_model_whole():
    """Each layer more made the first start longer, and those left out must be there again, also after a failure."""
    config = msgspec.structs.replace(MODELS["llama"], num_layers=6, sliding_windows=(7, 7, 0, 7, 7, 7))
    model = SimpleNamespace(config=config, layers=[*range(6)])
    whole = model.layers
    with pytest.raises(ZeroDivisionError), few_layers(model):
        assert model.layers == [0, 2, 5]
        _ = 1 / 0
    assert model.layers is whole
