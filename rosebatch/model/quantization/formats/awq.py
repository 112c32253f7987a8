"""AWQ: integers of 4 bits, packed along the outputs in an order of their own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np

from rosebatch.core.errors import UserError
from rosebatch.model.lazy_tensor import LazyTensor
from rosebatch.model.quantization.fields import Fields
from rosebatch.model.quantization.grouped import GroupedWeight, coded
from rosebatch.model.quantization.packing import unpacked
from rosebatch.model.quantization.stored import stored_as
from rosebatch.model.weights import Checkpoint
from rosebatch.ops.layout import Layout

_BITS = 4
# The nibble of a word that holds column 0, 1, ... of eight.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


@dataclass(frozen=True, slots=True)
class AWQ:
    """See ``Form``. ``qweight [in, out / 8]``, ``scales [G, out]``, ``qzeros [G, out / 8]``.

    Attributes:
        group: neighbouring columns that share a scale, -1: all; None: as many as there are scales for.
    """

    group: int | None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """By ``quantization_config`` or ``quant_config.json``.

        Raises:
            ValueError: a field has a value that is not served.
        """
        fields = Fields(config)
        if fields.get("bits", "w_bit") is not None:
            fields.integer(_BITS, _BITS, "bits", "w_bit")
        # AutoAWQ's name of the field, and GPTQModel's two.
        for name in ("version", "checkpoint_format", "format"):
            version = fields.get(name)
            if version is not None and str(version).lower() != "gemm":
                raise fields.unserved(name, version)
        if not fields.flag("zero_point", True):
            raise fields.unserved("zero_point", False)
        return cls(fields.group("group_size", "q_group_size"))

    @property
    def layouts(self) -> Sequence[Layout]:
        """See ``Form``."""
        return [Layout(_BITS, False, (1, max(self.group or 0, 0)), zeros=True)]

    def find(self, weights: Checkpoint, name: str, shape: tuple[int, ...]) -> GroupedWeight | None:
        """See ``Form``. Lists of modules are not checked: entries are parts of names, and match others too."""
        own = name.removesuffix("weight")
        if weights.shape(f"{own}qweight") is None or len(shape) != 2:
            return None
        divisors = f"{own.removesuffix('.').rpartition('.')[0]}.act.scales"
        if weights.shape(divisors) is not None:
            raise UserError(f"{weights.name_of(divisors)} is not supported: activations are to be divided by it")
        rows, columns = shape
        codes = _codes(weights, f"{own}qweight", columns, rows)
        found = coded(weights, codes, _BITS, f"{own}scales", self.group)
        return replace(found, zeros=_codes(weights, f"{own}qzeros", found.scales.shape[-1], rows))


def _codes(weights: Checkpoint, name: str, height: int, rows: int) -> LazyTensor:
    """``[height, rows / 8]`` words -> ``[rows, height]``."""
    words = stored_as(weights, name, (height, -(-rows // len(_PLACES))), "I32")
    order = (np.arange(0, rows, len(_PLACES))[:, None] + np.array(_PLACES)).flatten()
    return unpacked(words, _BITS, -1, len(order), 32).take(-1, order[:rows]).transposed()
