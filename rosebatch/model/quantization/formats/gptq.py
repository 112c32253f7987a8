"""GPTQ: integers of 2 to 8 bits, packed along the inputs."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor

from rosebatch.core.errors import UserError
from rosebatch.host.model_files import shown
from rosebatch.model.lazy_tensor import LazyTensor
from rosebatch.model.quantization.fields import Fields
from rosebatch.model.quantization.grouped import GroupedWeight, coded, symmetric
from rosebatch.model.quantization.packing import unpacked
from rosebatch.model.quantization.stored import order_of, stored_as
from rosebatch.model.weights import Checkpoint
from rosebatch.ops.layout import Layout

_SKIPPED, _OTHER = "-:", "+:"
# What a pattern may say otherwise.
_FIELDS = ("bits", "group_size", "sym", "desc_act")


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights of some modules are quantized.

    Attributes:
        bits: of a number.
        group: columns that share a scale, -1: all; None: as many as there are scales for.
        symmetric: whether the zero is half of the range, whichever one ``qzeros`` holds.
        ordered: whether groups are of neighbouring columns.
    """

    bits: int
    group: int | None
    symmetric: bool
    ordered: bool

    @classmethod
    def of(cls, fields: Fields) -> Self:
        """Raises ValueError for what is not served."""
        bits, group = fields.integer(2, 8, "bits"), fields.group("group_size")
        return cls(bits, group, fields.flag("sym", True), not fields.flag("desc_act", False))

    @property
    def layout(self) -> Layout:
        """How the numbers share their scales."""
        return Layout(self.bits, False, (1, max(self.group or 0, 0)), zeros=not self.symmetric)


@dataclass(frozen=True, slots=True)
class GPTQ:
    """See ``Form``. ``qweight [in · bits / 32, out]``, ``scales [G, out]``, ``qzeros [G, out · bits / 32]``, ``g_idx``.

    Attributes:
        scheme: of most modules.
        added: to the zeros: the first version of the format stores one less.
        dynamic: patterns of modules, and their own schemes; None: they are plain.
    """

    scheme: Scheme
    added: int
    dynamic: tuple[tuple[str, Scheme | None], ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """By ``quantization_config`` or ``quantize_config.json``.

        Raises:
            ValueError: a field is broken, or has a value that is not served.
        """
        fields = Fields(config)
        versions = [fields.choice(name, ("gptq", "gptq_v2", None)) for name in ("checkpoint_format", "format")]
        if len({*versions} - {None}) > 1:
            raise ValueError("quantization_config: checkpoint_format and format contradict each other")
        fields.choice("pack_dtype", ("int32", None))
        if fields.flag("is_marlin_format", False):
            raise fields.unserved("is_marlin_format", True)
        dynamic = []
        for pattern, own in fields.objects("dynamic").items():
            try:
                re.compile(_bare(pattern))
            except re.error:
                raise ValueError(f"quantization_config: dynamic: {shown(pattern)} is no pattern") from None
            is_plain = pattern.startswith(_SKIPPED)
            merged = {**config, **{name: own.values.get(name) for name in _FIELDS if name in own.values}}
            dynamic.append((pattern, None if is_plain else Scheme.of(replace(own, values=merged))))
        return cls(Scheme.of(fields), int("gptq_v2" not in versions), tuple(dynamic))

    @property
    def layouts(self) -> Sequence[Layout]:
        """See ``Form``."""
        return [scheme.layout for scheme in (self.scheme, *(own for _, own in self.dynamic)) if scheme is not None]

    def find(self, weights: Checkpoint, name: str, shape: tuple[int, ...]) -> GroupedWeight | None:
        """See ``Form``."""
        own = name.removesuffix("weight")
        words = weights.shape(f"{own}qweight")
        if words is None or len(shape) != 2:
            return None
        module = weights.name_of(f"{own}qweight").removesuffix(".qweight")
        scheme = self._scheme_of(module)
        (rows, columns), bits = shape, scheme.bits
        if [32 * count for count in words[:1]] != [columns * bits]:
            raise UserError(f"quantization_config: bits is {bits}, and {module}.qweight has shape {shown(words)}")
        stored = stored_as(weights, f"{own}qweight", (words[0], rows), "I32")
        codes = unpacked(stored, bits, 0, columns, 32).transposed()
        found = coded(weights, codes, bits, f"{own}scales", scheme.group)
        groups = found.scales.shape[-1]
        if weights.shape(f"{own}g_idx") is not None or not (scheme.ordered or groups == 1):
            found = replace(found, group_of=order_of(weights, f"{own}g_idx", found.group_of, groups))
        if scheme.symmetric and weights.shape(f"{own}qzeros") is None:
            return symmetric(found)
        packed = stored_as(weights, f"{own}qzeros", (groups, -(-rows * bits // 32)), "I32")
        zeros, mask = unpacked(packed, bits, -1, rows, 32), (1 << bits) - 1
        if scheme.symmetric:
            return symmetric(_with_equal(found, zeros, f"{module}.qzeros"))
        return replace(found, zeros=zeros.map(lambda read: (read + self.added) & mask).transposed())

    def _scheme_of(self, module: str) -> Scheme:
        """By the first pattern of ``dynamic`` that the name begins with."""
        for pattern, scheme in self.dynamic:
            if re.match(_bare(pattern), module):
                if scheme is None:
                    raise UserError(f"quantization_config: dynamic has {pattern!r}, and {module} is quantized")
                return scheme
        return self.scheme


def _with_equal(found: GroupedWeight, zeros: LazyTensor, name: str) -> GroupedWeight:
    """The same; once it is read, zeros that differ are an error. Which value they have is wrong in some files."""

    def checked(scales: Tensor) -> Tensor:
        read = zeros.read()
        if not read.is_meta and read.min() != read.max():
            raise UserError(f"quantization_config: sym is true, and {name} has zeros of several values")
        return scales

    return replace(found, scales=found.scales.map(checked))


def _bare(pattern: str) -> str:
    return pattern.removeprefix(_SKIPPED).removeprefix(_OTHER)
