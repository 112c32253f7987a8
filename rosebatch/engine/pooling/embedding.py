"""From pooled hidden states to the embedding of a prompt."""

from array import array

import numpy as np

from rosebatch.core.pooling_params import PoolingParams


def embedding_of(pooled: np.ndarray, params: PoolingParams) -> "array[float] | None":
    """Cut to the dimensions that are wanted, then normalised; None if it is not finite.

    Args:
        pooled: ``[H]`` fp32.
        params: what the request asks for. A vector of zeros stays as it is.
    """
    if not np.isfinite(pooled).all():
        return None
    kept = pooled[: params.dimensions].astype(np.float64)
    # Not by a dot product: where its operands lie may change the order in which it adds.
    length = np.sqrt(np.square(kept).sum())
    if params.normalize and length:
        kept /= length
    return array("f", kept.astype(np.float32).tobytes())
