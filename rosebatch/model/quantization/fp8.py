"""fp8 weights with ``quant_method`` fp8, as DeepSeek, Qwen and Mistral publish them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from rosebatch.host.model_files import shown
from rosebatch.model.quantization.grouped import GroupedWeight, scaled
from rosebatch.model.quantization.listed import by_parts, require_unlisted
from rosebatch.model.weights import WeightSource

# The first is a factor as the second is, whatever its name says.
_SCALES = ("_scale_inv", "_scale")


@dataclass(frozen=True, slots=True)
class FP8:
    """See ``Form``.

    Attributes:
        block: rows and columns that share a scale; None: one scale a matrix or a row.
        ignored: names of modules, or parts of them, whose weights are plain.
    """

    block: tuple[int, int] | None
    ignored: tuple[str, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """By ``quantization_config``. Scales of activations are not used: these stay in the dtype of the run.

        Raises:
            ValueError: a field has a value that is not served.
        """
        for name, served in {"fmt": ("e4m3", None), "expert_dtype": ("fp8", None)}.items():
            if config.get(name) not in served:
                raise ValueError(f"quantization_config: {name} {shown(config[name])} is not supported")
        block = config.get("weight_block_size")
        if block is not None and not (
            isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)
        ):
            raise ValueError(f"quantization_config: weight_block_size {shown(block)} is not supported")
        ignored = config.get("modules_to_not_convert") or config.get("ignored_layers") or ()
        return cls(None if block is None else (block[0], block[1]), tuple(ignored))

    def find(self, weights: WeightSource, name: str, shape: tuple[int, ...]) -> GroupedWeight | None:
        """See ``Form``."""
        scale = next((f"{name}{end}" for end in _SCALES if weights.shape(f"{name}{end}") is not None), None)
        if scale is None:
            return None
        module = weights.name_of(name).removesuffix(".weight")
        require_unlisted("modules_to_not_convert", self.ignored, module, by_parts)
        is_whole = weights.shape(scale) in ((), (1,))
        return scaled(weights, name, scale, shape, None if is_whole else self.block)
