"""Which format a weight of a checkpoint has."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from rosebatch.core.errors import UserError
from rosebatch.host.model_files import shown
from rosebatch.model.adapters.by_row import AdaptedWeight
from rosebatch.model.adapters.changes import Change
from rosebatch.model.quantization.dense import DenseWeight
from rosebatch.model.quantization.formats.awq import AWQ
from rosebatch.model.quantization.formats.bitsandbytes import BitsAndBytes
from rosebatch.model.quantization.formats.compressed_tensors import CompressedTensors
from rosebatch.model.quantization.formats.fp8 import FP8
from rosebatch.model.quantization.formats.gptq import GPTQ
from rosebatch.model.quantization.formats.modelopt import ModelOpt
from rosebatch.model.quantization.formats.mxfp4 import MXFP4
from rosebatch.model.weights import Form, WeightSource, lazy_tensor
from rosebatch.ops.weight import Weight

# By ``quant_method``. Each reads the other fields of the config; it raises ValueError for what is not served.
FORMS: dict[str, Callable[[Mapping[str, Any]], Form]] = {
    "awq": AWQ.of,
    "bitsandbytes": BitsAndBytes.of,
    "compressed-tensors": CompressedTensors.of,
    "fp8": FP8.of,
    "gptq": GPTQ.of,
    "modelopt": ModelOpt.of,
    "mxfp4": MXFP4.of,
}


def form_of(config: Mapping[str, Any] | None) -> Form | None:
    """The form of a checkpoint's matrices, by its ``quantization_config``; None for plain floats.

    Raises:
        ValueError: it is not served, or broken; the message names the field.
    """
    if config is None or config == {}:
        return None
    if not isinstance(config, Mapping):
        raise ValueError(f"quantization_config is no object: {shown(config)}")
    method = config.get("quant_method")
    if not isinstance(method, str) or method not in FORMS:
        served = ", ".join(FORMS)
        raise ValueError(f"quantization_config: quant_method {shown(method)} is not supported; supported are {served}")
    return FORMS[method](config)


def is_stored(weights: WeightSource, name: str, shape: tuple[int, ...]) -> bool:
    """Whether the checkpoint has the weight in some format; random weights are not stored."""
    return weights.shape(name) is not None or weights.find(name, shape) is not None


def load_weight(
    weights: WeightSource,
    name: str,
    shape: tuple[int, ...],
    *,
    transposed: bool = False,
    dtype: torch.dtype | None = None,
) -> Weight:
    """A matrix as it is stored, or with the adapter that changes it, or those that rows choose of; unread.

    Args:
        weights: of the model.
        name: transformers' name of the tensor of its values.
        shape: ``[out, in]`` or ``[E, out, in]``.
        transposed: whether a checkpoint with the values themselves has them as ``[in, out]``.
        dtype: of floats, before whatever follows; None for that of the run.
    """
    change = weights.change(name, shape)
    # A change is added in fp32.
    read = dtype if change is None else torch.float32
    matrix = weights.find(name, shape) or _plain(weights, name, shape, transposed, read)
    if change is not None:
        return changed(change, matrix, dtype or weights.dtype)
    added = weights.added(name, shape)
    return AdaptedWeight(matrix, added, weights.dtype) if added else matrix


def changed(change: Change, weight: Weight, dtype: torch.dtype) -> DenseWeight:
    """A matrix as an adapter makes it.

    Args:
        change: of the matrix.
        weight: the matrix; its values are float32, unless they are those of a quantized one.
        dtype: of the result.

    Raises:
        UserError: it stays quantized.
    """
    if isinstance(weight, DenseWeight):
        return DenseWeight(change.made_of(weight.values.map(torch.Tensor.float), dtype))
    what = "the model's matrix is quantized: take --quantization none, which decodes it, or a model of 16 bits"
    raise UserError(f"--lora: {change.names[0]}: {what}")


def load_matrix(weights: WeightSource, name: str, shape: tuple[int, ...], *, transposed: bool = False) -> Weight:
    """A matrix of a layer: one of floats is rounded if the run rounds them. Arguments as of ``load_weight``."""
    return rounded(weights, load_weight(weights, name, shape, transposed=transposed))


def rounded(weights: WeightSource, weight: Weight) -> Weight:
    """A matrix as the run keeps it."""
    if isinstance(weight, AdaptedWeight):
        return replace(weight, matrix=rounded(weights, weight.matrix))
    if weights.rounding is None or not isinstance(weight, DenseWeight):
        return weight
    return weights.rounding(weight.values, weights.dtype)


def _plain(
    weights: WeightSource, name: str, shape: tuple[int, ...], transposed: bool, dtype: torch.dtype | None
) -> DenseWeight:
    if not transposed:
        return DenseWeight(lazy_tensor(weights, name, shape, dtype=dtype))
    turned = (*shape[:-2], shape[-1], shape[-2])
    return DenseWeight(lazy_tensor(weights, name, turned, dtype=dtype).transposed())
