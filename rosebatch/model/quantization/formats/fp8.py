"""fp8 weights with ``quant_method`` fp8, as DeepSeek, Qwen and Mistral publish them, and as GPTQModel writes them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

from torch import Tensor

from rosebatch.model.quantization.fields import Fields
from rosebatch.model.quantization.grouped import GroupedWeight, scaled
from rosebatch.model.quantization.listed import by_parts, require_unlisted
from rosebatch.model.quantization.stored import finite
from rosebatch.model.weights import Checkpoint
from rosebatch.ops.layout import Layout

# The first is a factor as the second is, whatever its name says; but see ``inverse``.
_SCALES = ("_scale_inv", "_scale")


@dataclass(frozen=True, slots=True)
class FP8:
    """See ``Form``.

    Attributes:
        block: rows and columns that share a scale, 0 for all; None: one scale a matrix or a row.
        ignored: names of modules, or parts of them, whose weights are plain.
        inverse: whether numbers are divided by their scales, as GPTQModel has them.
    """

    block: tuple[int, int] | None
    ignored: tuple[str, ...]
    inverse: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """By ``quantization_config``. Scales of activations are not used: these stay in the dtype of the run.

        Raises:
            ValueError: a field has a value that is not served.
        """
        fields = Fields(config)
        fields.choice("fmt", ("e4m3", None))
        fields.choice("expert_dtype", ("fp8", None))
        method = fields.choice("weight_scale_method", ("tensor", "row", "block", None))
        inverse = fields.choice("weight_scale_semantics", ("inverse", None)) is not None
        block = (1, 0) if method == "row" else fields.block("weight_block_size")
        return cls(block, fields.names("modules_to_not_convert", "ignored_layers"), inverse)

    @property
    def layouts(self) -> Sequence[Layout]:
        """See ``Form``."""
        return [Layout(8, True, self.block or (0, 0))]

    def find(self, weights: Checkpoint, name: str, shape: tuple[int, ...]) -> GroupedWeight | None:
        """See ``Form``."""
        scale = next((f"{name}{end}" for end in _SCALES if weights.shape(f"{name}{end}") is not None), None)
        if scale is None:
            return None
        module = weights.name_of(name).removesuffix(".weight")
        require_unlisted("modules_to_not_convert", self.ignored, module, by_parts)
        found, stored = scaled(weights, name, scale, shape, self.block), scale

        def factors(divisors: Tensor) -> Tensor:
            return finite(weights, stored, divisors.reciprocal())

        return replace(found, scales=found.scales.map(factors)) if self.inverse else found
