"""What becomes of pooled states: numbers after the activation of a classifier."""

import numpy as np
import pytest

from rosebatch.core.pooling_params import PoolingParams
from rosebatch.engine.pooling.outputs import output_of


@pytest.mark.parametrize(
    ("activation", "expected"),
    [("sigmoid", [0.0, 0.5, 1.0]), ("softmax", [0.0, 0.0, 1.0]), ("none", [-2000.0, 0.0, 2000.0])],
)
def test_large_numbers(activation, expected):
    """The exponential of such a number overflowed: a warning of NumPy's between the results."""
    params = PoolingParams(task="classify", activation=activation, labels=("a", "b", "c"))
    found, reason = output_of(np.array([-2000, 0, 2000], np.float32), params)
    assert (found.tolist(), reason) == (expected, "classified")
