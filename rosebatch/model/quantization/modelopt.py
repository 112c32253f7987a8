"""ModelOpt, by NVIDIA: fp8 and 4-bit floats."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from rosebatch.core.errors import UserError
from rosebatch.host.model_files import shown
from rosebatch.model.quantization.fp4 import nvfp4
from rosebatch.model.quantization.grouped import GroupedWeight, scaled
from rosebatch.model.quantization.listed import by_glob, require_unlisted
from rosebatch.model.weights import WeightSource

_SERVED = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MXFP8")
_MIXED = "MIXED_PRECISION"


@dataclass(frozen=True, slots=True)
class ModelOpt:
    """See ``Form``. What quantizes activations is not used: these stay in the dtype of the run."""

    ignored: tuple[str, ...]

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Self:
        """By ``quantization_config``, or the fields of ``hf_quant_config.json``.

        Raises:
            ValueError: a field has a value that is not served.
        """
        algorithm, layers = config.get("quant_algo"), config.get("quantized_layers") or {}
        found = [each.get("quant_algo") for each in layers.values()] if algorithm == _MIXED else [algorithm]
        for each in found:
            if each not in _SERVED:
                raise ValueError(f"quantization_config: quant_algo {shown(each)} is not supported")
        return cls(tuple(config.get("exclude_modules") or config.get("ignore") or ()))

    def find(self, weights: WeightSource, name: str, shape: tuple[int, ...]) -> GroupedWeight | None:
        """See ``Form``."""
        scale, whole = f"{name}_scale", f"{name}_scale_2"
        if weights.shape(scale) is None or weights.shape(name) is None:
            return None
        module = weights.name_of(name).removesuffix(".weight")
        require_unlisted("exclude_modules", self.ignored, module, by_glob)
        if weights.shape(f"{name.removesuffix('weight')}pre_quant_scale") is not None:
            raise UserError(f"{module}.pre_quant_scale is not supported")
        if weights.shape(whole) is None:
            return scaled(weights, name, scale, shape)
        return nvfp4(weights, name, scale, shape, factor=whole)
