"""compressed-tensors, which llm-compressor writes: integers and floats of few bits, with a scheme for each module."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch

from rosebatch.core.errors import UserError
from rosebatch.host.model_files import shown
from rosebatch.model.quantization.fields import Fields
from rosebatch.model.quantization.fp4 import fp4, nvfp4
from rosebatch.model.quantization.grouped import GroupedWeight, grouped, scaled, symmetric
from rosebatch.model.quantization.listed import by_regex, require_unlisted
from rosebatch.model.quantization.packing import unpacked
from rosebatch.model.quantization.stored import POWERS, order_of, stored_as
from rosebatch.model.weights import Checkpoint
from rosebatch.ops.layout import Layout

# Fields that change values by rules of their own.
_UNSERVED = ("sparsity_config", "transform_config")
# Formats with a byte for each number.
_BYTES = ("int-quantized", "float-quantized", "naive-quantized")
_FORMATS = (
    *(*_BYTES, "pack-quantized", "mixed-precision", "dense"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized", None),
)
_STRATEGIES = ("tensor", "channel", "group", "tensor_group", "block", None)
# Numbers of a byte, by ``type``.
_NUMBERS = {"int": "I8", "float": "F8_E4M3"}
# Rows and columns that share a scale.
_NVFP4 = (1, 16)
# Any layer with a matrix has this class.
_CLASS = "Linear"


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of some modules are quantized.

    Attributes:
        targets: names of modules, patterns, or classes.
        bits: of a number.
        kind: ``int`` or ``float``; None if the config does not say.
        symmetric: whether zeros are in the middle of the range.
        ordered: whether groups are of neighbouring columns.
        block: rows and columns that share a scale, 0 for all; None if the config does not say.
        packed: whether integers may take less than a byte.
    """

    targets: tuple[str, ...]
    bits: int
    kind: str | None
    symmetric: bool
    ordered: bool
    block: tuple[int, int] | None
    packed: bool

    @classmethod
    def of(cls, group: Fields, outer: str | None) -> Self:
        """By a group of ``config_groups``, and the format of groups without one. Raises ValueError if not served."""
        weights = group.object("weights")
        strategy, size = weights.choice("strategy", _STRATEGIES), weights.group("group_size")
        block = {"tensor": (0, 0), "channel": (1, 0), "block": weights.block("block_structure")}.get(strategy or "")
        if strategy == "block" and block is None:
            raise weights.unserved("block_structure", None)
        if strategy in ("group", "tensor_group") or (strategy is None and size is not None and size > 0):
            block = 1, weights.integer(1, 1 << 30, "group_size")
        return cls(
            targets=_patterns(group, "targets"),
            bits=weights.integer(1, 8, "num_bits"),
            kind=weights.choice("type", (*_NUMBERS, None)),
            symmetric=weights.flag("symmetric", True),
            ordered=weights.get("actorder") not in ("group", "dynamic", True),
            block=block,
            packed=(group.choice("format", _FORMATS) or outer) not in _BYTES,
        )

    @property
    def layout(self) -> Layout:
        """How the numbers share their scales. Integers of a byte each count as such, however few bits they use."""
        bits = self.bits if self.packed or self.kind == "float" else 8
        return Layout(bits, self.kind == "float", self.block or (1, 0), zeros=not self.symmetric)


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
        fields = Fields(config)
        for name in _UNSERVED:
            if fields.get(name):
                raise ValueError(f"quantization_config: {name} is not supported")
        outer = fields.choice("format", _FORMATS)
        groups = fields.objects("config_groups").values()
        # Some checkpoints have scales of a KV cache alone, whose weights are plain.
        if not groups and not fields.get("kv_cache_scheme"):
            raise fields.unserved("config_groups", fields.get("config_groups"))
        schemes = [Scheme.of(group, outer) for group in groups if group.get("weights") is not None]
        return cls(tuple(schemes), _patterns(fields, "ignore"))

    @property
    def layouts(self) -> Sequence[Layout]:
        """See ``Form``."""
        return [scheme.layout for scheme in self.schemes]

    def find(self, weights: Checkpoint, name: str, shape: tuple[int, ...]) -> GroupedWeight | None:
        """See ``Form``."""
        packed, scale = f"{name}_packed", f"{name}_scale"
        is_packed = weights.shape(packed) is not None
        if not is_packed and (weights.shape(scale) is None or weights.shape(name) is None):
            return None
        stored = packed if is_packed else name
        module = weights.name_of(stored).removesuffix("_packed").removesuffix(".weight")
        require_unlisted("ignore", self.ignored, module, by_regex)
        scheme = self._scheme_of(module, name.removesuffix(".weight"))
        if not is_packed:
            if scheme.kind == "float" and scheme.bits != 8:
                raise UserError(f"quantization_config: num_bits is {scheme.bits}, and {module} holds numbers of 8 bits")
            kinds = list(_NUMBERS.values()) if scheme.kind is None else [_NUMBERS[scheme.kind]]
            found = scaled(weights, name, scale, shape, scheme.block, kinds)
        elif scheme.kind == "int" or (scheme.kind is None and weights.kind(packed) != "U8"):
            found = _packed_integers(weights, name, shape, scheme, module)
        elif scheme.bits != 4:
            raise UserError(f"quantization_config: num_bits is {scheme.bits}, and {module} holds numbers of 4 bits")
        elif weights.kind(scale) in POWERS and weights.shape(f"{name}_global_scale") is None:
            return fp4(weights, packed, scale, shape, scheme.block)
        elif scheme.block not in (None, _NVFP4):
            raise UserError(f"quantization_config: group_size is not 16, and {module} is NVFP4")
        else:
            return nvfp4(weights, packed, scale, shape, divisor=f"{name}_global_scale")
        return _with_zeros(weights, f"{name}_zero_point", found, scheme)

    def _scheme_of(self, *names: str) -> Scheme:
        """By a module's name in the checkpoint, or transformers': an exact name, else a pattern, else a class."""
        for matches in (str.__eq__, by_regex, lambda target, _: target == _CLASS):
            for scheme in self.schemes:
                if any(matches(target, name) for target in scheme.targets for name in names):
                    return scheme
        raise UserError(f"quantization_config: no group of config_groups has {names[0]}, which is quantized")


def _patterns(fields: Fields, name: str) -> tuple[str, ...]:
    """A list of names and patterns."""
    found = fields.names(name)
    for each in found:
        try:
            re.compile(each.removeprefix("re:"))
        except re.error:
            raise ValueError(f"{fields.path}: {name}: {shown(each)} is no pattern") from None
    return found


def _packed_integers(
    weights: Checkpoint, name: str, shape: tuple[int, ...], scheme: Scheme, module: str
) -> GroupedWeight:
    """Codes, which begin at 0."""
    bits, words, scale = scheme.bits, weights.shape(f"{name}_packed") or (), f"{name}_scale"
    if weights.kind(f"{name}_packed") == "U8":
        raise UserError(f"quantization_config: type is int, and {module} holds floats of 4 bits")
    needed = -(-shape[-1] * bits // 32)
    if words[-1:] != (needed,):
        raise UserError(f"quantization_config: num_bits is {bits}, and {module}.weight_packed has shape {shown(words)}")
    stored = stored_as(weights, f"{name}_packed", (*shape[:-1], needed), "I32")
    codes = unpacked(stored, bits, -1, shape[-1], 32)
    found = replace(grouped(weights, codes, torch.uint8, scale, scheme.block), bits=bits)
    order = f"{name}_g_idx"
    if weights.shape(order) is None and scheme.ordered:
        return found
    return replace(found, group_of=order_of(weights, order, found.group_of, found.scales.shape[-1]))


def _with_zeros(weights: Checkpoint, name: str, found: GroupedWeight, scheme: Scheme) -> GroupedWeight:
    """Zeros of integers; those of packed ones begin at 0 too, and without any half of the range is zero."""
    is_packed, half = found.kind == torch.uint8, 1 << (scheme.bits - 1)
    if weights.shape(name) is None and scheme.symmetric:
        return symmetric(found) if is_packed else found
    if not is_packed or weights.kind(name) == "I8":
        zeros = stored_as(weights, name, found.scales.shape, "I8").map(lambda read: read.view(torch.int8))
        return replace(found, zeros=zeros.map(lambda read: read.short() + half) if is_packed else zeros)
    *lead, rows, groups = found.scales.shape
    stored = stored_as(weights, name, (*lead, -(-rows * scheme.bits // 32), groups), "I32")
    return replace(found, zeros=unpacked(stored, scheme.bits, -2, rows, 32))
