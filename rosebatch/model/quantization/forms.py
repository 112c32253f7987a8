"""Which format a weight of a checkpoint has."""

from collections.abc import Callable, Mapping
from typing import Any

from rosebatch.host.model_files import shown
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


def load_weight(weights: WeightSource, name: str, shape: tuple[int, ...], *, transposed: bool = False) -> Weight:
    """A matrix as it is stored, unread.

    Args:
        weights: of the model.
        name: transformers' name of the tensor of its values.
        shape: ``[out, in]`` or ``[E, out, in]``.
        transposed: whether a checkpoint with the values themselves has them as ``[in, out]``.
    """
    return weights.find(name, shape) or _plain(weights, name, shape, transposed)


def load_matrix(weights: WeightSource, name: str, shape: tuple[int, ...], *, transposed: bool = False) -> Weight:
    """A matrix of a layer: one of floats is rounded if the run rounds them. Arguments as of ``load_weight``."""
    found = load_weight(weights, name, shape, transposed=transposed)
    if weights.rounding is None or not isinstance(found, DenseWeight):
        return found
    return weights.rounding(found.values, weights.dtype)


def _plain(weights: WeightSource, name: str, shape: tuple[int, ...], transposed: bool) -> DenseWeight:
    if not transposed:
        return DenseWeight(lazy_tensor(weights, name, shape))
    return DenseWeight(lazy_tensor(weights, name, (*shape[:-2], shape[-1], shape[-2])).transposed())
