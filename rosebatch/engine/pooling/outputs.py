"""What a request gets of its pooled hidden states. Another kind of output is another function here. No torch."""

from array import array
from collections.abc import Sequence
from itertools import compress

import numpy as np

from rosebatch.core.errors import RowError
from rosebatch.core.pooling_params import PoolingParams


def require_output(params: PoolingParams, hidden_size: int | None) -> None:
    """Check that a model can give it; ``hidden_size`` is None if no request has more dimensions.

    Raises:
        RowError: the hidden states have fewer dimensions than are wanted.
    """
    if hidden_size is not None and (params.dimensions or 0) > hidden_size:
        raise RowError("invalid_dimensions", f"dimensions must be in [1, {hidden_size}] for this model")


def outputs_of(pooled: Sequence[np.ndarray], params: Sequence[PoolingParams]) -> list["array[float] | None"]:
    """What requests get, from ``[H]`` or ``[N, labels]`` fp32 of each; None for one that is not finite.

    Those of a step are computed together: one by one, NumPy's calls took a tenth of the host's time.
    """
    alike: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for place, (values, own) in enumerate(zip(pooled, params, strict=True)):
        # Rows share their parameters.
        alike.setdefault((id(own), values.shape), []).append(place)
    found: list[array[float] | None] = [None] * len(pooled)
    for places in alike.values():
        states = np.stack([pooled[place] for place in places])
        finite = np.isfinite(states).all(axis=tuple(range(1, states.ndim)))
        own = params[places[0]]
        outputs = (_embeddings if own.task == "embed" else _numbers)(states[finite].astype(np.float64), own)
        for place, output in zip(compress(places, finite), outputs.astype(np.float32), strict=True):
            found[place] = array("f", output.tobytes())
    return found


def _numbers(outputs: np.ndarray, params: PoolingParams) -> np.ndarray:
    """What a classifier's outputs ``[..., labels]`` are after its activation."""
    if params.activation == "sigmoid":
        # The same as 1 / (1 + exp(-x)), where that would overflow too.
        outputs = np.exp(-np.logaddexp(0, -outputs))
    elif params.activation == "softmax":
        outputs = np.exp(outputs - outputs.max(-1, keepdims=True))
        outputs /= outputs.sum(-1, keepdims=True)
    return outputs


def _embeddings(pooled: np.ndarray, params: PoolingParams) -> np.ndarray:
    """``[P, H]``, cut to the dimensions that are wanted, then normalised. A vector of zeros stays as it is."""
    kept = np.ascontiguousarray(pooled[:, : params.dimensions])
    if params.normalize:
        # Not by a dot product: where its operands lie may change the order in which it adds.
        lengths = np.sqrt(np.square(kept).sum(-1, keepdims=True))
        kept /= np.where(lengths, lengths, 1)
    return kept
