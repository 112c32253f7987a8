"""GPTQ: integers of 2 to 8 bits, packed along the inputs."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
import torch

from rosebatch.core.errors import UserError
from rosebatch.host.model_files import shown
from rosebatch.model.quantization.grouped import GroupedWeight, in_groups
from rosebatch.model.quantization.packing import unpacked
from rosebatch.model.weights import WeightSource, lazy_stored

_SKIPPED = "-:"


@dataclass(frozen=True, slots=True)
class GPTQ:
    """See ``Form``. ``qweight [in · bits / 32, out]``, ``scales [G, out]``, ``qzeros [G, out · bits / 32]``, ``g_idx``.

    Attributes:
        bits: of a number.
        symmetric: whether the zero is half of the range, whatever ``qzeros`` holds.
        added: to the zeros: the first version of the format stores one less.
        dynamic: patterns of modules -> fields that replace these.
    """

    bits: int
    symmetric: bool
    added: int
    dynamic: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """By ``quantization_config`` or ``quantize_config.json``.

        Raises:
            ValueError: a field is broken, or has a value that is not served.
        """
        bits, version = config.get("bits"), config.get("checkpoint_format") or config.get("format") or "gptq"
        if type(bits) is not int or not 2 <= bits <= 8:
            raise ValueError(f"quantization_config: bits {shown(bits)} is not supported")
        if version not in ("gptq", "gptq_v2"):
            raise ValueError(f"quantization_config: checkpoint_format {shown(version)} is not supported")
        dynamic = tuple((config.get("dynamic") or {}).items())
        return cls(bits, bool(config.get("sym", True)), int(version == "gptq"), dynamic)

    def find(self, weights: WeightSource, name: str, shape: tuple[int, ...]) -> GroupedWeight | None:
        """See ``Form``."""
        own = name.removesuffix("weight")
        words, groups = weights.shape(f"{own}qweight"), weights.shape(f"{own}scales")
        if words is None or len(shape) != 2:
            return None
        module = weights.name_of(f"{own}qweight").removesuffix(".qweight")
        form = self._of_module(module)
        (rows, columns), bits = shape, form.bits
        if words[0] * 32 != columns * bits:
            raise UserError(f"quantization_config: bits is {bits}, and {module}.qweight has shape {shown(words)}")
        if groups is None or len(groups) != 2:
            raise UserError(f"tensor {f'{module}.scales'!r} has shape {shown(groups)}: [groups, {rows}] is supported")
        codes = unpacked(lazy_stored(weights, f"{own}qweight", (words[0], rows)), bits, 0, columns, 32).transposed()
        found = GroupedWeight(
            numbers=codes,
            kind=torch.uint8,
            scales=lazy_stored(weights, f"{own}scales", (groups[0], rows)).transposed(),
            zeros=None,
            row_of=np.arange(rows),
            group_of=_groups(weights, f"{own}g_idx", columns, groups[0]),
            dtype=weights.dtype,
        )
        if form.symmetric:
            half = 1 << (bits - 1)
            return replace(found, numbers=codes.map(lambda read: read - half), kind=torch.int8)
        packed = lazy_stored(weights, f"{own}qzeros", (groups[0], -(-rows * bits // 32)))
        mask = (1 << bits) - 1
        zeros = unpacked(packed, bits, -1, rows, 32).map(lambda read: (read + form.added) & mask)
        return replace(found, zeros=zeros.transposed())

    def _of_module(self, module: str) -> "GPTQ":
        """With what the first pattern of ``dynamic`` that the name matches says."""
        for pattern, fields in self.dynamic:
            if not re.match(re.sub(r"^[+-]:", "", pattern), module):
                continue
            if pattern.startswith(_SKIPPED):
                raise UserError(f"quantization_config: dynamic has {pattern!r}, and {module} is quantized")
            fields = fields or {}
            return replace(self, bits=fields.get("bits", self.bits), symmetric=fields.get("sym", self.symmetric))
        return self


def _groups(weights: WeightSource, name: str, columns: int, count: int) -> np.ndarray:
    """The group of each column; by ``desc_act`` they are in no order."""
    if weights.shape(name) is None:
        return in_groups(columns, -(-columns // count))
    return weights.on_host(name, (columns,))
