"""Tensors of a checkpoint whose dtype is checked: bytes of another one would be read as something else."""

import numpy as np
import torch
from torch import Tensor

from rosebatch.core.errors import UserError
from rosebatch.host.model_files import shown
from rosebatch.model.lazy_tensor import LazyTensor, select
from rosebatch.model.quantization.packing import powers_of_two
from rosebatch.model.weights import FLOATS, Checkpoint, lazy_stored

# Scales that are exponents of powers of two.
POWERS = ("U8", "F8_E8M0")
_NARROW = "F8_E4M3"


def shape_of(weights: Checkpoint, name: str) -> tuple[int, ...]:
    """The stored shape of a tensor.

    Raises:
        UserError: it is missing.
    """
    found = weights.shape(name)
    if found is None:
        raise UserError(f"weights have no tensor {name!r}")
    return found


def stored_as(weights: Checkpoint, name: str, shape: tuple[int, ...], *kinds: str) -> LazyTensor:
    """See ``lazy_stored``.

    Args:
        weights: of the model.
        name, shape: of the tensor.
        kinds: the dtypes that it may have, as safetensors names them.

    Raises:
        UserError: it is missing, or has another dtype.
    """
    kind = weights.kind(name)
    if kind not in kinds:
        served = " or ".join(kinds)
        raise UserError(f"tensor {weights.name_of(name)!r} holds {shown(kind)}: {served} is supported")
    return lazy_stored(weights, name, shape)


def host_array(weights: Checkpoint, name: str, shape: tuple[int, ...], *kinds: str) -> np.ndarray:
    """See ``Checkpoint.on_host``; other arguments and errors as of ``stored_as``."""
    stored_as(weights, name, shape, *kinds)
    return weights.on_host(name, shape)


def stored_scales(
    weights: Checkpoint,
    name: str,
    shape: tuple[int, ...],
    *kinds: str,
    grid: tuple[int, ...] | None = None,
) -> LazyTensor:
    """Scales as fp32.

    Args:
        weights, name, shape, kinds: see ``stored_as``; without kinds, they are floats.
        grid: the shape of the result, if it is not that of the tensor; all scales are read then.

    Raises:
        UserError: the tensor is missing, or has another dtype; when it is read: one is NaN or infinite.
    """
    stored, kind = stored_as(weights, name, shape, *(kinds or FLOATS)), weights.kind(name)
    if grid not in (None, shape):
        found, flat = stored, grid
        stored = LazyTensor(flat, lambda cuts: select(found.read().view(flat), cuts))

    def floats(read: Tensor) -> Tensor:
        if kind in POWERS:
            read = powers_of_two(read)
        return finite(weights, name, (read.view(torch.float8_e4m3fn) if kind == _NARROW else read).float())

    return stored.map(floats)


def finite(weights: Checkpoint, name: str, values: Tensor) -> Tensor:
    """The values, checked.

    Raises:
        UserError: one is NaN or infinite: it would make all tokens nonsense.
    """
    if not values.is_meta and not values.isfinite().all():
        raise UserError(f"tensor {weights.name_of(name)!r} has a value that is no finite number")
    return values


def order_of(weights: Checkpoint, name: str, neighbours: np.ndarray, groups: int) -> np.ndarray:
    """The group of each column, ``neighbours`` if all are -1: quantizers begin with that.

    Raises:
        UserError: the tensor is missing, or names a group that there is not.
    """
    found = host_array(weights, name, neighbours.shape, "I32", "I64")
    if (found == -1).all():
        return neighbours
    if found.min() < 0 or found.max() >= groups:
        what = f"{found.min()} to {found.max()}, of {groups} groups"
        raise UserError(f"tensor {weights.name_of(name)!r} has {what}")
    return found
