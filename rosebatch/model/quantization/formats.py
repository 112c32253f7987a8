"""Which format a weight of a checkpoint has."""

from collections.abc import Callable

from rosebatch.model.quantization import mxfp4
from rosebatch.model.quantization.dense import DenseWeight
from rosebatch.model.weights import WeightSource, lazy_tensor
from rosebatch.ops.weight import Weight

# Each finds the weight of a name and shape, unread; None if it is not stored in this format.
FORMATS: list[Callable[[WeightSource, str, tuple[int, ...]], Weight | None]] = [mxfp4.find]


def is_stored(weights: WeightSource, name: str, shape: tuple[int, ...]) -> bool:
    """Whether the checkpoint has the weight in some format; random weights are not stored."""
    return weights.shape(name) is not None or _find(weights, name, shape) is not None


def load_weight(weights: WeightSource, name: str, shape: tuple[int, ...], *, transposed: bool = False) -> Weight:
    """A matrix of a model, unread.

    Args:
        weights: of the model.
        name: transformers' name of the tensor of its values.
        shape: ``[out, in]`` or ``[E, out, in]``.
        transposed: whether a checkpoint with the values themselves has them as ``[in, out]``.
    """
    found = _find(weights, name, shape)
    if found is not None:
        return found
    if not transposed:
        return DenseWeight(lazy_tensor(weights, name, shape))
    return DenseWeight(lazy_tensor(weights, name, (*shape[:-2], shape[-1], shape[-2])).transposed())


def _find(weights: WeightSource, name: str, shape: tuple[int, ...]) -> Weight | None:
    return next((weight for find in FORMATS if (weight := find(weights, name, shape)) is not None), None)
