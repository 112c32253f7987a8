"""What a request gets of its pooled hidden states. Another kind of output is another function here. No torch."""

from array import array

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


def output_of(pooled: np.ndarray, params: PoolingParams) -> tuple["array[float] | None", str]:
    """The output and the finish reason, from ``[H]`` or ``[N, labels]`` fp32; no output if they are not finite."""
    if not np.isfinite(pooled).all():
        return None, "error"
    if params.task == "embed":
        return _embedding(pooled, params), "embedded"
    return _numbers(pooled, params), "classified" if params.task == "classify" else "scored"


def _numbers(outputs: np.ndarray, params: PoolingParams) -> "array[float]":
    """What a classifier's outputs are after its activation."""
    found = outputs.astype(np.float64)
    if params.activation == "sigmoid":
        # The same as 1 / (1 + exp(-x)), where that would overflow too.
        found = np.exp(-np.logaddexp(0, -found))
    elif params.activation == "softmax":
        found = np.exp(found - found.max(-1, keepdims=True))
        found /= found.sum(-1, keepdims=True)
    return array("f", found.astype(np.float32).tobytes())


def _embedding(pooled: np.ndarray, params: PoolingParams) -> "array[float]":
    """Cut to the dimensions that are wanted, then normalised. A vector of zeros stays as it is."""
    kept = pooled[: params.dimensions].astype(np.float64)
    # Not by a dot product: where its operands lie may change the order in which it adds.
    length = np.sqrt(np.square(kept).sum())
    if params.normalize and length:
        kept /= length
    return array("f", kept.astype(np.float32).tobytes())
