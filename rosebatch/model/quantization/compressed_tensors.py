"""compressed-tensors, which llm-compressor writes: integers and floats of few bits, with a scheme for each module."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch

from rosebatch.core.errors import UserError
from rosebatch.host.model_files import shown
from rosebatch.model.lazy_tensor import LazyTensor
from rosebatch.model.quantization.fp4 import nvfp4
from rosebatch.model.quantization.grouped import GroupedWeight, grouped, scaled
from rosebatch.model.quantization.listed import by_regex, require_unlisted
from rosebatch.model.quantization.packing import E2M1_KIND, e2m1, unpacked
from rosebatch.model.weights import WeightSource, lazy_stored

# Fields that change values by rules of their own.
_UNSERVED = ("sparsity_config", "transform_config")
# Any layer with a matrix has this class.
_CLASS = "Linear"


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of some modules are quantized.

    Attributes:
        targets: names of modules, patterns, or classes.
        bits: of a number.
        group: neighbouring columns that share a scale; None: all, or as many as there are scales for.
        block: rows and columns that share a scale; None: those of ``group``.
    """

    targets: tuple[str, ...]
    bits: int
    group: int | None
    block: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class CompressedTensors:
    """See ``Form``. What quantizes activations is not used: these stay in the dtype of the run."""

    schemes: tuple[Scheme, ...]
    ignored: tuple[str, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """By ``quantization_config``.

        Raises:
            ValueError: a field is broken, or has a value that is not served.
        """
        for name in _UNSERVED:
            if config.get(name):
                raise ValueError(f"quantization_config: {name} is not supported")
        groups = config.get("config_groups")
        if not isinstance(groups, Mapping):
            raise ValueError(f"quantization_config: config_groups is no object: {shown(groups)}")
        schemes = [_scheme(name, group) for name, group in groups.items() if group.get("weights")]
        return cls(tuple(schemes), tuple(config.get("ignore") or ()))

    def find(self, weights: WeightSource, name: str, shape: tuple[int, ...]) -> GroupedWeight | None:
        """See ``Form``."""
        packed, scale = f"{name}_packed", f"{name}_scale"
        if weights.shape(packed) is None and (weights.shape(scale) is None or weights.shape(name) is None):
            return None
        module = weights.name_of(packed if weights.shape(packed) else name).removesuffix("_packed")
        module = module.removesuffix(".weight")
        require_unlisted("ignore", self.ignored, module, by_regex)
        scheme = self._scheme_of(module)
        if weights.shape(packed) is None:
            found = scaled(weights, name, scale, shape, scheme.block)
            zeros = f"{name}_zero_point"
            if weights.shape(zeros) is None:
                return found
            stored = lazy_stored(weights, zeros, found.scales.shape)
            return replace(found, zeros=stored.map(lambda read: read.view(torch.int8)))
        if weights.kind(packed) == "U8":
            bits = 4
            _require_bits(scheme, bits, module)
            if weights.shape(f"{name}_global_scale") is not None:
                return nvfp4(weights, packed, scale, shape, divisor=f"{name}_global_scale")
            codes = unpacked(lazy_stored(weights, packed, (*shape[:-1], -(-shape[-1] // 2))), bits, -1, shape[-1], 8)
            return grouped(weights, e2m1(codes), E2M1_KIND, scale)
        return _packed_integers(weights, name, shape, scheme, module)

    def _scheme_of(self, module: str) -> Scheme:
        """An exact name comes before a pattern, and a pattern before a class."""
        for matches in (str.__eq__, by_regex, lambda target, _: target == _CLASS):
            for scheme in self.schemes:
                if any(matches(target, module) for target in scheme.targets):
                    return scheme
        raise UserError(f"quantization_config: no group of config_groups has {module}, which is quantized")


def _scheme(name: str, group: Mapping[str, Any]) -> Scheme:
    weights, where = group["weights"], f"quantization_config: config_groups: {name}: weights"
    bits, size = weights.get("num_bits"), weights.get("group_size")
    if type(bits) is not int or not 1 <= bits <= 8:
        raise ValueError(f"{where}: num_bits {shown(bits)} is not supported")
    block = weights.get("block_structure")
    if isinstance(block, str):
        block = [int(each) for each in block.split("x")]
    if weights.get("strategy") == "block" and not (isinstance(block, list) and len(block) == 2):
        raise ValueError(f"{where}: block_structure {shown(block)} is not supported")
    is_grouped = weights.get("strategy") in ("group", "tensor_group") and type(size) is int and size > 0
    targets = tuple(group.get("targets") or ())
    return Scheme(targets, bits, size if is_grouped else None, (block[0], block[1]) if block else None)


def _require_bits(scheme: Scheme, bits: int, module: str) -> None:
    if scheme.bits != bits:
        raise UserError(f"quantization_config: num_bits is {scheme.bits}, and {module} holds numbers of {bits} bits")


def _packed_integers(
    weights: WeightSource, name: str, shape: tuple[int, ...], scheme: Scheme, module: str
) -> GroupedWeight:
    """Codes begin at 0: half of the range is added to what they stand for."""
    bits, words = scheme.bits, weights.shape(f"{name}_packed") or ()
    needed = -(-shape[-1] * bits // 32)
    if words[-1] != needed:
        raise UserError(f"quantization_config: num_bits is {bits}, and {module}.weight_packed has shape {shown(words)}")
    codes = unpacked(lazy_stored(weights, f"{name}_packed", (*shape[:-1], needed)), bits, -1, shape[-1], 32)
    block = None if scheme.group is None else (1, scheme.group)
    found = grouped(weights, codes, torch.uint8, f"{name}_scale", block, _order(weights, f"{name}_g_idx", shape[-1]))
    zeros = weights.shape(f"{name}_zero_point")
    if zeros is None:
        half = 1 << (bits - 1)
        return replace(found, numbers=codes.map(lambda read: read - half), kind=torch.int8)
    rows = found.scales.shape[-2]
    packed: LazyTensor = lazy_stored(weights, f"{name}_zero_point", zeros)
    return replace(found, zeros=unpacked(packed, bits, -2, rows, 32))


def _order(weights: WeightSource, name: str, columns: int) -> np.ndarray | None:
    """The group of each column, if they are not in order."""
    if weights.shape(name) is None:
        return None
    order = weights.on_host(name, (columns,))
    return None if (order < 0).any() else order
