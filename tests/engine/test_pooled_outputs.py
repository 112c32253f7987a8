"""What becomes of pooled states: numbers after the activation of a classifier."""

import numpy as np
import pytest

from rosebatch.core.pooling_params import PoolingParams
from rosebatch.engine.pooling.outputs import outputs_of


@pytest.mark.parametrize(
    ("activation", "expected"),
    [("sigmoid", [0.0, 0.5, 1.0]), ("softmax", [0.0, 0.0, 1.0]), ("none", [-2000.0, 0.0, 2000.0])],
)
def test_large_numbers(activation, expected):
    """The exponential of such a number overflowed: a warning of NumPy's between the results."""
    params = PoolingParams(task="classify", activation=activation, labels=("a", "b", "c"))
    (found,) = outputs_of([np.array([-2000, 0, 2000], np.float32)], [params])
    assert found.tolist() == expected


def test_prompts_of_a_step_get_what_each_gets_alone():
    """What another prompt has, also one that is not finite, or has other parameters or another size, changes no bit."""
    rng = np.random.default_rng(0)
    kinds = [
        *(PoolingParams(normalize=normalize, dimensions=n) for normalize in (True, False) for n in (None, 5, 1)),
        *(PoolingParams(task="classify", activation=each) for each in ("sigmoid", "softmax", "none")),
    ]
    kinds = [kinds[number % len(kinds)] for number in range(90)]
    states = [
        rng.normal(size=(2, 3) if number % 7 == 6 and own.task == "classify" else 37)
        for number, own in enumerate(kinds)
    ]
    pooled = [each.astype(np.float32) for each in states]
    pooled[0][3] = np.nan
    pooled[6][0] = np.inf
    pooled[9][:] = 0
    together = outputs_of(pooled, kinds)
    assert [number for number, found in enumerate(together) if found is None] == [0, 6]
    assert together == [outputs_of([own], [params])[0] for own, params in zip(pooled, kinds, strict=True)]
    for found, own, params in zip(together, pooled, kinds, strict=True):
        if params.task == "embed" and found is not None:
            kept = own[: params.dimensions].astype(np.float64)
            length = np.sqrt(np.square(kept).sum())
            expected = kept / length if params.normalize and length else kept
            assert found.tobytes() == expected.astype(np.float32).tobytes()
